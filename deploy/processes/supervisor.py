"""Keeps the router and the workers of one machine running, says when they are ready, and ends them in order.

Invariant: whatever ends the supervisor ends its children: a drain, a second Ctrl-C, a failed start,
or its own death (see `exec_child`). A child that dies, or for which there is no room, is started again;
one that cannot be configured, or keeps dying before the system was ever ready, ends everything.
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
GRACE_S = 5.0  # beyond what a process may take to drain
KILL_DEADLINE_S = 5.0


@dataclass(frozen=True, slots=True)
class Deadlines:
    """How long starting and draining may take, in seconds."""

    start_s: float
    router_drain_s: float
    worker_drain_s: float


@dataclass(slots=True)
class Kept:
    """A process that is started again whenever it ends, until it may go."""

    spec: ProcessSpec
    may_go: asyncio.Event = field(default_factory=asyncio.Event)
    backoff: Backoff = field(default_factory=Backoff)
    child: Child | None = None  # None between two starts
    keeper: "asyncio.Task[None] | None" = None


class End(NamedTuple):
    """Of a process, in words."""

    how: str
    lived_s: float = 0.0
    code: int | None = None  # None: it did not start
    last_line: str = ""  # that it wrote

    @property
    def is_final(self) -> bool:
        """Whether another start would end likewise."""
        return self.code == CONFIG_EXIT_CODE


class Supervisor:
    """Runs `specs` until stopped; `begin` and `retire` change what runs meanwhile.

    Args:
        worker_modules: what workers import, for them all in a fork server; empty for none.
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
        """Have this done from when all is ready; it is cancelled before the drain."""
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
        """Drain and end, with that reason and exit code unless there is one already."""
        if not self.failure:
            self.failure, self._failed_with = reason, exit_code
        self._stopping.set()

    def begin(self, spec: ProcessSpec) -> None:
        """Start a process, and keep it running; there is none of its name."""
        assert spec.name not in self._kept, spec.name
        kept = self._kept[spec.name] = Kept(spec)
        kept.keeper = self._watched(self._keep_running(kept))

    async def retire(self, name: str) -> None:
        """Have a process finish what it has and end, and keep it no more; it is killed when it takes too long."""
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
        """Of all processes that are kept, or on their way out."""
        return set(self._kept)

    def pid(self, name: str) -> int | None:
        """Of a process that is kept; None between two starts."""
        child = self._kept[name].child
        return None if child is None else child.pid

    def num_crashes(self, name: str) -> int:
        """How often a process that is kept has ended in a row."""
        return self._kept[name].backoff.num_crashes

    def _take_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self.stop)

    def _watched(self, work: "asyncio._CoroutineLike[None]") -> "asyncio.Task[None]":
        """A task whose unexpected end stops everything instead of passing in silence."""
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
            delay_s = kept.backoff.after(end.lived_s if self.ready.is_set() else 0.0)  # unserved is not forgiven
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
        """From its start, if there is room for it and it may not go yet, to its end."""
        try:
            child = await self._started(kept)
        except OSError as error:  # no memory, file or process is left: nothing else is to end for that
            return End(f"could not be started ({error})")
        if child is None:
            return End("may go")
        kept.child = child
        if kept.may_go.is_set():  # while it was being started
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
        """Complete, and with all our workers; so what answers on this port is our router and no other."""
        registered = {worker.pid for worker in health.workers}
        pids = [self.pid(kept.spec.name) for kept in self._kept.values() if kept.spec.kind is Kind.WORKER]
        return health.is_complete and registered.issuperset(pids)

    # --- ending ---------------------------------------------------------------------------------

    async def _drain(self) -> None:
        """The router first, while the workers still finish what it waits for; then the workers; then their memory."""
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
        """What processes of a kind may take to end."""
        drains_s = {Kind.ROUTER: self._deadlines.router_drain_s, Kind.WORKER: self._deadlines.worker_drain_s}
        return GRACE_S + (drains_s.get(kind, 0.0) if self.ready.is_set() else 0.0)

    async def _terminate(self, leaving: Sequence[Kept], deadline_s: float) -> None:
        """SIGTERM; return when all have ended, at the deadline, or when asked to kill."""
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
