"""The supervisor's end of the fork server: workers are forked there, but become the supervisor's children."""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Mapping, Sequence

from deploy.processes.child import Adopted, Backoff, Child, describe_exit, make_pipe
from deploy.processes.console import Console
from deploy.processes.early import FORK_SERVER, Early, begin, modules_for
from deploy.processes.fork_server import order
from deploy.processes.launch_plan import Kind, ProcessSpec
from deploy.processes.mps_guard import adopt_orphans
from deploy.processes.placement import Placement

IMPORT_DEADLINE_S = 60.0
"""Seconds for the first answer; imports may take 20 s with a cold page cache."""
FORK_DEADLINE_S = 2.0
"""Seconds for later answers, usually milliseconds; then workers start without the fork server."""
MAX_ANSWER_BYTES = 16
MAX_CRASHES = 3
KILL_DEADLINE_S = 5.0


def modules_of(placements: Sequence[Placement]) -> tuple[str, ...]:
    """Return the modules imported by the workers of these placements."""
    return modules_for(has_gpu=any(each.gpu is not None for each in placements))


class ForkServer:
    """A fork server, kept running from `begin` to `end`.

    Args:
        modules: modules to import; empty for no fork server.
        early: a fork server begun already, which is taken if it imports these modules, and otherwise ended.
    """

    def __init__(
        self, modules: tuple[str, ...], environ: Mapping[str, str], console: Console, early: Early | None = None
    ) -> None:
        self._spec = ProcessSpec("fork-server", FORK_SERVER, modules, Kind.WORKER)
        self._environ = environ
        self._early = early
        self._console = console
        self._child: Child | None = None
        self._control: socket.socket | None = None
        self._deadline_s = IMPORT_DEADLINE_S  # for the next answer
        self._turn = asyncio.Lock()
        self._keeper: asyncio.Task[None] | None = None
        self._is_ending = False

    async def begin(self) -> None:
        """Start the fork server, unless it is started; `fork` waits for the imports."""
        if self._keeper is not None:
            return
        early, self._early = self._early, None
        if early is not None and early.modules != self._spec.flags:
            early.end()
            early = None
        if not self._spec.flags:
            return
        try:
            child = self._start(early)
        except (OSError, NotImplementedError) as error:
            self._console.say(f"no fork server: {error}; workers import for themselves", "W")
        else:
            self._keeper = asyncio.create_task(self._keep(child))

    async def fork(self, spec: ProcessSpec) -> Child | None:
        """Return a forked process; None without a fork server that answers."""
        async with self._turn:
            if self._control is None:
                return None
            try:
                return await self._forked(spec, self._control)
            except TimeoutError:
                self._console.say(f"killing {self._spec.name}: no answer in {self._deadline_s:g} s", "W")
                self._kill()
            except OSError as error:
                if not self._is_ending:
                    self._console.say(f"{spec.name} imports for itself: {error}", "W")
            return None

    async def end(self) -> None:
        """End the fork server for good; forked processes go on."""
        if self._is_ending:
            return
        self._is_ending = True
        if self._keeper is not None:
            self._keeper.cancel()
        self._kill()
        if self._child is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._child.ended(), KILL_DEADLINE_S)
        await self._hang_up()

    def _kill(self) -> None:
        if self._child is not None:
            self._child.signal(signal.SIGKILL)

    def _start(self, early: Early | None = None) -> Child:
        """Start the fork server, or become the owner of one that was begun early; raises OSError."""
        adopt_orphans()
        begun = early or begin(self._spec.flags, self._environ)
        self._child = Child(self._spec, Adopted(begun.pid), begun.output, self._console)
        begun.control.setblocking(False)
        self._control, self._deadline_s = begun.control, IMPORT_DEADLINE_S
        return self._child

    async def _hang_up(self) -> None:
        """Close the connection after the end of the fork server, once a waiting `fork` has failed."""
        async with self._turn:
            if self._control is not None:
                self._control.close()
            self._control = None

    async def _keep(self, child: Child) -> None:
        """Restart the fork server after each end, until too many crashes."""
        backoff = Backoff()
        while True:
            code = await child.ended()
            await self._hang_up()
            delay_s = backoff.after(child.lived_s)
            is_last = backoff.num_crashes > MAX_CRASHES
            then = "workers import for themselves" if is_last else f"another in {delay_s:g} s"
            self._console.say(f"{self._spec.name} ended with {describe_exit(code)}; {then}", "W")
            if is_last:
                return
            await asyncio.sleep(delay_s)
            child = await self._started()

    async def _started(self) -> Child:
        """Retry the start until memory and files suffice; workers import for themselves meanwhile."""
        backoff = Backoff()
        while True:
            try:
                return self._start()
            except OSError as error:  # no memory, file or process left
                delay_s = backoff.after(0.0)
                when = f"in {delay_s:g} s" if delay_s else "at once"
                self._console.say(f"{self._spec.name} could not be started ({error}); again {when}", "W")
            await asyncio.sleep(delay_s)

    async def _forked(self, spec: ProcessSpec, control: socket.socket) -> Child:
        """Fork a process; raises OSError if the fork server ends or the process is not adopted, and TimeoutError."""
        (orders, to_order), (output, from_output) = make_pipe(), make_pipe()
        try:
            with orders, to_order, from_output:
                socket.send_fds(control, [b"fork"], [orders.fileno(), from_output.fileno()])
                answer = asyncio.get_running_loop().sock_recv(control, MAX_ANSWER_BYTES)
                pid = await asyncio.wait_for(answer, self._deadline_s)
                if not pid:
                    raise ConnectionResetError("the fork server has ended")
                self._deadline_s = FORK_DEADLINE_S
                process = Adopted(int(pid))
                to_order.write(order(spec))
            return Child(spec, process, output, self._console)
        except BaseException:
            output.close()
            raise
