"""Supervisor of the router and the workers of a machine: keeps processes running, reports readiness, ends processes in
order.

Invariant: whatever ends the supervisor ends all children: a drain, a second Ctrl-C, a failed start, or death of the
supervisor (see `exec_child`). A child is started again after a crash or a shortage of resources. Everything ends if a
child has wrong settings, or keeps crashing before the system was ever ready.
"""

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import aiohttp

from common.wire.transport.port_sharing import RELIEVED_STATUS
from deploy.operate.health import Health, fetch_health
from deploy.processes.child import Backoff, Child, describe_exit
from deploy.processes.console import Console
from deploy.processes.forks import ForkServer
from deploy.processes.launch_plan import Kind, ProcessSpec

CONFIG_EXIT_CODE = 2
MAX_CRASHES_BEFORE_READY = 3
POLL_INTERVAL_S = 0.2
GRACE_S = 5.0  # added to the drain deadline
KILL_DEADLINE_S = 5.0


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Limits of starting and draining, in seconds."""

    start_s: float
    router_drain_s: float
    worker_drain_s: float


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


class Supervisor:
    """Runner of `specs` until stopped; `begin` and `retire` change the processes meanwhile.

    Args:
        worker_modules: modules of workers, imported once in a fork server; empty for none.
    """

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        url: str,
        deadlines: Deadlines,
        environ: Mapping[str, str],
        console: Console,
        worker_modules: tuple[str, ...] = (),
    ) -> None:
        self.ready: asyncio.Event = asyncio.Event()
        self.health: Health | None = None
        self.failure = ""
        self._specs = specs
        self._url = url
        self._deadlines = deadlines
        self._environ = environ
        self._console = console
        self._fork_server = ForkServer(worker_modules, environ, console)
        self._failed_with = 0
        self._stopping = asyncio.Event()
        self._killing = asyncio.Event()
        self._kept: dict[str, Kept] = {}
        self._companions: list[Callable[[], Coroutine[None, None, None]]] = []

    def accompany(self, work: Callable[[], Coroutine[None, None, None]]) -> None:
        """Run `work` once all is ready, until cancelled before the drain."""
        self._companions.append(work)

    async def run(self, on_ready: Callable[[Health], None]) -> int:
        """Start everything, call `on_ready` once, and return the exit code after the drain."""
        self._take_signals()
        await self._fork_server.begin()
        for spec in self._specs:
            self.begin(spec)
        others = [self._watched(self._announce(on_ready)), *map(self._watched, map(self._once_ready, self._companions))]
        try:
            await self._stopping.wait()
        finally:
            self._stopping.set()
            for kept in self._kept.values():
                kept.may_go.set()
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            await self._drain()
        if self.failure:
            self._console.say(self.failure, "E")
        return self._failed_with

    def stop(self) -> None:
        """Drain and end; a second call kills at once."""
        (self._killing if self._stopping.is_set() else self._stopping).set()

    def fail(self, reason: str, exit_code: int = 1) -> None:
        """Drain and end, with the given reason and exit code unless there is a reason already."""
        if not self.failure:
            self.failure, self._failed_with = reason, exit_code
        self._stopping.set()

    def begin(self, spec: ProcessSpec) -> None:
        """Start a process, and keep it running; the name must be free."""
        assert spec.name not in self._kept, spec.name
        kept = self._kept[spec.name] = Kept(spec)
        kept.keeper = self._watched(self._keep_running(kept))

    async def retire(self, name: str) -> None:
        """Have a process finish its work and end, without a restart; kill the process after the deadline."""
        kept = self._kept[name]
        kept.may_go.set()
        await self._terminate([kept], self._limit_s(kept.spec.kind))
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

    def num_crashes(self, name: str) -> int:
        """Return the number of consecutive ends of a kept process."""
        return self._kept[name].backoff.num_crashes

    def _take_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self.stop)

    def _watched(self, work: "asyncio._CoroutineLike[None]") -> "asyncio.Task[None]":
        """Make a task whose unexpected error stops everything instead of passing silently."""
        task = asyncio.get_running_loop().create_task(work)

        def check(done: "asyncio.Task[None]") -> None:
            if not done.cancelled() and (error := done.exception()) is not None:
                self.fail(f"supervisor: {type(error).__name__}: {error}")

        task.add_done_callback(check)
        return task

    # --- starting and restarting ----------------------------------------------------------------

    async def _keep_running(self, kept: Kept) -> None:
        name = kept.spec.name
        while not kept.may_go.is_set():
            end = await self._life(kept)
            if kept.may_go.is_set():
                return
            if end.code == RELIEVED_STATUS and kept.spec.kind is Kind.ROUTER:
                self._console.say("another router has taken the port over, and serves: draining")
                self._stopping.set()
                return
            delay_s = kept.backoff.after(end.lived_s if self.ready.is_set() else 0.0)  # else crashes add up
            if not self.ready.is_set() and (end.is_final or kept.backoff.num_crashes > MAX_CRASHES_BEFORE_READY):
                reason = f"{name} {end.how} before the system was ready"
                told = f": {end.last_line}" if end.is_final else ""
                self.fail(reason + told, CONFIG_EXIT_CODE if end.is_final else 1)
                return
            when = f"in {delay_s:g} s" if delay_s else "at once"
            self._console.say(f"{name} {end.how}; restarting {when}", "I" if end.code == 0 else "W")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(kept.may_go.wait(), delay_s)

    async def _life(self, kept: Kept) -> End:
        """Start a process, if possible and still wanted, and wait for its end."""
        try:
            child = await self._started(kept)
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

    async def _started(self, kept: Kept) -> Child | None:
        spec = kept.spec
        forked = await self._fork_server.fork(spec) if spec.kind is Kind.WORKER else None
        if forked is not None or kept.may_go.is_set():
            return forked
        return await Child.start(spec, self._environ, self._console)

    async def _once_ready(self, work: Callable[[], Coroutine[None, None, None]]) -> None:
        await self.ready.wait()
        await work()

    async def _announce(self, on_ready: Callable[[Health], None]) -> None:
        deadline_s = time.monotonic() + self._deadlines.start_s
        reason = "the router does not answer"
        async with aiohttp.ClientSession() as session:
            while time.monotonic() < deadline_s:
                health = await fetch_health(session, self._url)
                if health is not None and self._all_there(health):
                    self.health = health
                    self.ready.set()
                    self._console.end_loading()
                    on_ready(health)
                    return
                if health is not None:
                    reason = "; ".join(health.problems) or "workers or KV paths are missing"
                await asyncio.sleep(POLL_INTERVAL_S)
        self.fail(f"not ready after {self._deadlines.start_s:g} s: {reason}")

    def _all_there(self, health: Health) -> bool:
        """Tell whether the system is complete with all our workers, so the port is served by our router."""
        registered = {worker.pid for worker in health.workers}
        pids = [self.pid(kept.spec.name) for kept in self._kept.values() if kept.spec.kind is Kind.WORKER]
        return health.is_complete and registered.issuperset(pids)

    # --- ending ---------------------------------------------------------------------------------

    async def _drain(self) -> None:
        """End the router first, while workers finish its requests; then workers; then memory servers."""
        self._console.end_loading()
        await self._fork_server.end()
        if any(kept.child for kept in self._kept.values()) and not self._killing.is_set():
            why = f"{self.failure}; " if self.failure else ""
            self._console.say(f"{why}draining; once more to kill")
            for kind in Kind:
                await self._terminate(
                    [kept for kept in self._kept.values() if kept.spec.kind is kind], self._limit_s(kind)
                )
        for kept in self._kept.values():
            kept.may_go.set()
            if kept.child is not None:
                kept.child.signal(signal.SIGKILL)
        if keepers := [kept.keeper for kept in self._kept.values() if kept.keeper is not None]:
            await asyncio.wait(keepers, timeout=KILL_DEADLINE_S)

    def _limit_s(self, kind: Kind) -> float:
        """Return the seconds for processes of a kind to end."""
        drains_s = {Kind.ROUTER: self._deadlines.router_drain_s, Kind.WORKER: self._deadlines.worker_drain_s}
        return GRACE_S + (drains_s.get(kind, 0.0) if self.ready.is_set() else 0.0)

    async def _terminate(self, leaving: Sequence[Kept], deadline_s: float) -> None:
        """Send SIGTERM; return when all have ended, at the deadline, or when asked to kill."""
        for kept in leaving:
            if kept.child is not None:
                kept.child.signal(signal.SIGTERM)
        ends = [kept.keeper for kept in leaving if kept.keeper is not None and not kept.keeper.done()]
        if not ends:
            return
        all_ended = asyncio.ensure_future(asyncio.wait(ends))
        killing = asyncio.ensure_future(self._killing.wait())
        try:
            await asyncio.wait([all_ended, killing], timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED)
            if not all_ended.done():
                late = [kept.spec.name for kept in leaving if kept.child is not None]
                why = "asked to stop at once" if self._killing.is_set() else f"not drained in {deadline_s:g} s"
                self._console.say(f"killing {', '.join(late)}: {why}", "W")
        finally:
            all_ended.cancel()
            killing.cancel()
