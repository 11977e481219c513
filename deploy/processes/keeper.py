"""Keeper of processes: restarts each after a crash or a shortage of resources, until the process may go."""

import asyncio
import contextlib
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from common.wire.transport.port_sharing import RELIEVED_STATUS
from deploy.processes.child import Backoff, Child, describe_exit
from deploy.processes.console import Console
from deploy.processes.forks import ForkServer
from deploy.processes.launch_plan import Kind, ProcessSpec

CONFIG_EXIT_CODE = 2
MAX_CRASHES_BEFORE_READY = 3
GRACE_S = 5.0  # added to the drain deadline
KILL_DEADLINE_S = 5.0


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Limits of starting and draining, in seconds."""

    start_s: float
    router_drain_s: float
    worker_drain_s: float

    def of(self, kind: Kind, *, was_ready: bool) -> float:
        """Return the seconds for processes of a kind to end."""
        drains_s = {Kind.ROUTER: self.router_drain_s, Kind.WORKER: self.worker_drain_s}
        return GRACE_S + (drains_s.get(kind, 0.0) if was_ready else 0.0)


class Lifetime:
    """State of a supervised system: ready, draining, about to be killed; and the failure that ended it."""

    def __init__(self) -> None:
        self.ready, self.stopping, self.killing = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.failure, self.exit_code = "", 0

    def stop(self) -> None:
        """Drain and end; a second call kills at once."""
        (self.killing if self.stopping.is_set() else self.stopping).set()

    def fail(self, reason: str, exit_code: int = 1) -> None:
        """Drain and end, with the given reason and exit code unless there is a reason already."""
        if not self.failure:
            self.failure, self.exit_code = reason, exit_code
        self.stopping.set()

    def watched(self, work: "asyncio._CoroutineLike[None]") -> "asyncio.Task[None]":
        """Make a task whose unexpected error stops everything instead of passing silently."""
        task = asyncio.get_running_loop().create_task(work)

        def check(done: "asyncio.Task[None]") -> None:
            if not done.cancelled() and (error := done.exception()) is not None:
                self.fail(f"supervisor: {type(error).__name__}: {error}")

        task.add_done_callback(check)
        return task


@dataclass(slots=True)
class Kept:
    """A process restarted after each end, until it may go."""

    spec: ProcessSpec
    may_go: asyncio.Event = field(default_factory=asyncio.Event)
    backoff: Backoff = field(default_factory=Backoff)
    child: Child | None = None  # None between two starts
    keeper: "asyncio.Task[None] | None" = None


class End(NamedTuple):
    """End of a process, in words."""

    how: str
    lived_s: float = 0.0
    code: int | None = None  # None: not started
    last_line: str = ""  # of its output

    @property
    def is_final(self) -> bool:
        """True if another start would end likewise."""
        return self.code == CONFIG_EXIT_CODE


class Keeper:
    """Processes of a system by name; each is started again after its end."""

    def __init__(
        self,
        life: Lifetime,
        deadlines: Deadlines,
        environ: Mapping[str, str],
        console: Console,
        fork_server: ForkServer,
    ) -> None:
        self._life, self._deadlines, self._environ, self._console = life, deadlines, environ, console
        self._fork_server = fork_server
        self._kept: dict[str, Kept] = {}

    def start(self, spec: ProcessSpec) -> None:
        """Start a process, and keep it running; the name must be free."""
        assert spec.name not in self._kept, spec.name
        kept = self._kept[spec.name] = Kept(spec)
        kept.keeper = self._life.watched(self._keep_running(kept))

    async def stop(self, name: str) -> None:
        """Have a process finish its work and end, without a restart; kill the process after the deadline."""
        kept = self._kept[name]
        kept.may_go.set()
        await self._terminate([kept], self._deadlines.of(kept.spec.kind, was_ready=self._life.ready.is_set()))
        if kept.child is not None:
            kept.child.signal(signal.SIGKILL)
        assert kept.keeper is not None
        await asyncio.wait([kept.keeper], timeout=KILL_DEADLINE_S)
        if kept.keeper.done():
            del self._kept[name]
        else:
            self._console.say(f"{name}, pid {self.pid(name)}, cannot be killed: its GPU's driver may hang", "W")

    @property
    def names(self) -> set[str]:
        """Names of all processes kept, or about to end."""
        return set(self._kept)

    def pid(self, name: str) -> int | None:
        """Return the pid of a kept process; None between two starts."""
        child = self._kept[name].child
        return None if child is None else child.pid

    @property
    def worker_pids(self) -> set[int | None]:
        """Pids of all kept workers; None for a worker between two starts."""
        return {self.pid(name) for name, kept in self._kept.items() if kept.spec.kind is Kind.WORKER}

    def num_crashes(self, name: str) -> int:
        """Return the number of consecutive ends of a kept process."""
        return self._kept[name].backoff.num_crashes

    async def _keep_running(self, kept: Kept) -> None:
        name = kept.spec.name
        while not kept.may_go.is_set():
            end = await self._run_once(kept)
            if kept.may_go.is_set():
                return
            if end.code == RELIEVED_STATUS and kept.spec.kind is Kind.ROUTER:
                self._console.say("another router has taken the port over, and serves: draining")
                self._life.stopping.set()
                return
            delay_s = kept.backoff.after(end.lived_s if self._life.ready.is_set() else 0.0)  # else crashes add up
            if not self._life.ready.is_set() and (end.is_final or kept.backoff.num_crashes > MAX_CRASHES_BEFORE_READY):
                reason = f"{name} {end.how} before the system was ready"
                told = f": {end.last_line}" if end.is_final else ""
                self._life.fail(reason + told, CONFIG_EXIT_CODE if end.is_final else 1)
                return
            when = f"in {delay_s:g} s" if delay_s else "at once"
            self._console.say(f"{name} {end.how}; restarting {when}", "I" if end.code == 0 else "W")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(kept.may_go.wait(), delay_s)

    async def _run_once(self, kept: Kept) -> End:
        """Start a process, if possible and still wanted, and wait for its end."""
        try:
            child = await self._fork_server.fork(kept.spec) if kept.spec.kind is Kind.WORKER else None
            if child is None and not kept.may_go.is_set():
                child = await Child.start(kept.spec, self._environ, self._console)
        except OSError as error:  # out of memory, files or processes; others go on
            return End(f"could not be started ({error})")
        if child is None:
            return End("may go")
        kept.child = child
        if kept.may_go.is_set():  # retired during the start
            child.signal(signal.SIGTERM)
        code = await child.ended()
        kept.child = None
        return End(f"ended with {describe_exit(code)}", child.lived_s, code, child.last_line)

    def release(self) -> None:
        """Let all processes go: none is started again."""
        for kept in self._kept.values():
            kept.may_go.set()

    async def end(self) -> None:
        """End all processes: the router first, while workers finish its requests; then workers; then memory servers."""
        self.release()
        if any(kept.child for kept in self._kept.values()) and not self._life.killing.is_set():
            why = f"{self._life.failure}; " if self._life.failure else ""
            self._console.say(f"{why}draining; once more to kill")
            for kind in Kind:
                await self._terminate(
                    [kept for kept in self._kept.values() if kept.spec.kind is kind],
                    self._deadlines.of(kind, was_ready=self._life.ready.is_set()),
                )
        for kept in self._kept.values():
            if kept.child is not None:
                kept.child.signal(signal.SIGKILL)
        if keepers := [kept.keeper for kept in self._kept.values() if kept.keeper is not None]:
            await asyncio.wait(keepers, timeout=KILL_DEADLINE_S)

    async def _terminate(self, leaving: Sequence[Kept], deadline_s: float) -> None:
        """Send SIGTERM; return when all have ended, at the deadline, or when asked to kill."""
        for kept in leaving:
            if kept.child is not None:
                kept.child.signal(signal.SIGTERM)
        ends = [kept.keeper for kept in leaving if kept.keeper is not None and not kept.keeper.done()]
        if not ends:
            return
        all_ended = asyncio.ensure_future(asyncio.wait(ends))
        killing = asyncio.ensure_future(self._life.killing.wait())
        try:
            await asyncio.wait([all_ended, killing], timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED)
            if not all_ended.done():
                late = [kept.spec.name for kept in leaving if kept.child is not None]
                why = "asked to stop at once" if self._life.killing.is_set() else f"not drained in {deadline_s:g} s"
                self._console.say(f"killing {', '.join(late)}: {why}", "W")
        finally:
            all_ended.cancel()
            killing.cancel()
