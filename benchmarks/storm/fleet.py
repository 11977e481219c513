"""The workers of a storm and their memory servers: hit as planned, started again, and watched for other ends."""

import asyncio
import contextlib
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

from benchmarks.storm.blows import MEMORY, NETWORK, OF_HOST, OF_MEMORY, ROUTER_HOST, Blow, Kind
from benchmarks.storm.clients import Verdicts
from benchmarks.storm.hosts import WEATHERS, StormHosts
from tests.e2e.programs import Program
from tests.e2e.system import System
from tests.e2e.two_hosts import BACK, BACK_MEMORY, FRONT
from tests.support.wire import Weather

JOIN_DEADLINE_S = 120.0
END_DEADLINE_S = 90.0
POLL_S = 0.1
REGISTERED = "registered with the router"
LEFT = "taking nothing new"
"""Log text of a worker whose memory server was silent for too long."""
NOTICED_S = 1.0
"""Time until a worker has noticed the end of its memory server's silence."""
OUSTED = 2
"""Exit status of a worker whose id was taken by another worker."""


class Fleet:
    """Workers of a system by name, each with the number of workers for which the worker stands by.

    A blow is left out for a worker still recovering from an earlier blow, and for a network still in bad weather.
    """

    def __init__(self, system: System, workers: Mapping[str, int], verdicts: Verdicts) -> None:
        self.num = Counter[Kind]()
        self._spans: list[tuple[float, float, str]] = []  # of blows: begin, end, what
        self._system = system
        self._verdicts = verdicts
        self._workers = workers
        self._homes = {name: system.homes.get(name, MEMORY) for name in workers}
        self.memories = sorted({MEMORY, *self._homes.values()})
        self._locks = {name: asyncio.Lock() for name in (*workers, NETWORK)}
        self._num_starts = Counter[str]()

    def start(self, name: str) -> None:
        """Start a process, even if its name is in use; the earlier process's log is kept."""
        log = Path(self._system.directory.name) / f"{name}.log"
        if log.exists():
            self._num_starts[name] += 1
            log.rename(log.with_name(f"{name}.{self._num_starts[name]:03d}.log"))
        if name in self.memories:
            self._system.start_memory(name)
        else:
            flags = ["--net-handoff-endpoint", "auto"] if name.startswith("decode") else []
            self._system.start_worker(name, "--worker-standby", str(self._workers[name]), *flags)

    async def weather(self, blows: Sequence[Blow]) -> None:
        """Deliver all blows at their times; return after the last, when every worker has been started again."""
        start_s = time.monotonic()
        watch = asyncio.create_task(self._watch())
        tasks = []
        for blow in blows:
            await asyncio.sleep(start_s + blow.at_s - time.monotonic())
            tasks += [asyncio.create_task(self._hit(blow, name)) for name in blow.targets]
        await asyncio.gather(*tasks)
        watch.cancel()

    async def end_all(self) -> None:
        """Send SIGTERM to workers, then to the router, then to memory servers; all must end with status 0."""
        last = ("router", *self.memories)
        workers = [process for name, process in self._system.processes.items() if name not in last]
        for processes in (workers, *([self._system.processes[name]] for name in last)):
            for process in processes:
                process.send_signal(signal.SIGTERM)
            for process in processes:
                await self._ended(process, (0,), "the end of the storm")

    def during(self, end_s: float, seconds: float) -> str:
        """Return the blows that workers were recovering from in a time before `end_s`; "" for none."""
        met = [what for begin_s, over_s, what in self._spans if begin_s < end_s and over_s > end_s - seconds]
        return ", ".join(met)

    async def _hit(self, blow: Blow, name: str) -> None:
        if name in self._locks and blow.kind not in OF_HOST and self._locks[name].locked():
            return
        begin_s = time.monotonic()
        await self._deliver(blow, name)
        self._spans.append((begin_s, time.monotonic(), f"{blow.kind} of {name} for {blow.pause_s:.1f} s"))

    async def _deliver(self, blow: Blow, name: str) -> None:
        if blow.kind in OF_MEMORY:
            await (self._freeze(blow, name) if blow.kind is Kind.FREEZE else self._forget(blow, name))
            return
        if blow.kind in OF_HOST:
            await (self._vanish(blow) if blow.kind is Kind.VANISH else self._stand_still(blow, name))
            return
        async with self._locks[name]:
            self.num[blow.kind] += 1
            match blow.kind:
                case _ if blow.kind in WEATHERS:
                    self._hosts.set(WEATHERS[blow.kind])
                    await asyncio.sleep(blow.pause_s)
                    self._hosts.set(Weather())
                    return
                case Kind.STOP:
                    process = self._system.processes[name]
                    process.send_signal(signal.SIGSTOP)
                    await asyncio.sleep(blow.pause_s)
                    process.send_signal(signal.SIGCONT)
                    return
                case Kind.KILL:
                    await self._end(name, signal.SIGKILL)
                    await asyncio.sleep(blow.pause_s)
                    self.start(name)
                case Kind.DRAIN:
                    await self._end(name, signal.SIGTERM)
                    await asyncio.sleep(blow.pause_s)
                    self.start(name)
                case Kind.REPLACE | Kind.OUST:
                    await self._replace(blow, name)
            await self._joined(name)

    @property
    def _hosts(self) -> StormHosts:
        assert isinstance(self._system, StormHosts)
        return self._system

    @contextlib.asynccontextmanager
    async def _having(self, *names: str) -> AsyncIterator[None]:
        """Wait until the processes have recovered, and keep other blows from them."""
        async with contextlib.AsyncExitStack() as stack:
            for name in names:
                await stack.enter_async_context(self._locks[name])
            yield

    def _users(self, memory: str) -> list[str]:
        return [name for name, home in self._homes.items() if home == memory]

    async def _forget(self, blow: Blow, memory: str) -> None:
        """Kill a memory server; workers finish their requests, and start again with the next server."""
        users = self._users(memory)
        async with self._having(*users):
            self.num[blow.kind] += 1
            await self._end(memory, signal.SIGKILL)
            self.start(memory)
            for name in users:
                await self._ended(self._system.processes.pop(name), (0,), f"{name} without its memory server")
                self.start(name)
            for name in users:
                await self._joined(name)

    async def _freeze(self, blow: Blow, memory: str) -> None:
        """Stop a memory server for a while, then start the workers that left because of the silence."""
        async with self._having(*self._users(memory)):
            self.num[blow.kind] += 1
            process = self._system.processes[memory]
            process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(blow.pause_s)
            process.send_signal(signal.SIGCONT)
            await self._start_who_left(memory, blow)

    async def _start_who_left(self, memory: str, blow: Blow) -> None:
        await asyncio.sleep(NOTICED_S)
        left = [name for name in self._users(memory) if LEFT in self._system.log(name)]
        for name in left:
            await self._ended(self._system.processes.pop(name), (0,), f"{name} after {blow.pause_s:.1f} s of silence")
            self.start(name)
        for name in left:
            await self._joined(name)

    async def _vanish(self, blow: Blow) -> None:
        """Cut the other host off, kill all that runs there, and start it again after the pause."""
        users = self._users(BACK_MEMORY)
        async with self._having(NETWORK, *users):
            self.num[blow.kind] += 1
            self._hosts.set(WEATHERS[Kind.CUT])
            processes = {name: self._system.processes.pop(name) for name in (*users, BACK_MEMORY)}
            self._hosts.signal_all(BACK, signal.SIGKILL)
            for name, process in processes.items():
                await self._ended(process, (-signal.SIGKILL,), f"the end of {name} with its host")
            await asyncio.sleep(blow.pause_s)
            self._hosts.set(Weather())
            for name in (BACK_MEMORY, *users):
                self.start(name)
            for name in users:
                await self._joined(name)

    async def _stand_still(self, blow: Blow, target: str) -> None:
        """Stop all that runs on a host for a while."""
        host, memory, others = (FRONT, MEMORY, []) if target == ROUTER_HOST else (BACK, BACK_MEMORY, [NETWORK])
        async with self._having(*others, *self._users(memory)):
            self.num[blow.kind] += 1
            self._hosts.signal_all(host, signal.SIGSTOP)
            await asyncio.sleep(blow.pause_s)
            self._hosts.signal_all(host, signal.SIGCONT)
            await self._start_who_left(memory, blow)

    async def _end(self, name: str, number: signal.Signals) -> None:
        process = self._system.processes.pop(name)
        process.send_signal(number)
        await self._ended(process, (-number,) if number == signal.SIGKILL else (0,), f"{number.name} to {name}")

    async def _replace(self, blow: Blow, name: str) -> None:
        """Start a second worker of equal id; the second stays, the first leaves unless ended earlier."""
        number = signal.SIGTERM if blow.kind is Kind.REPLACE else signal.SIGKILL
        earlier = self._system.processes.pop(name)
        self.start(name)
        await self._joined(name)
        await asyncio.sleep(blow.pause_s)
        earlier.send_signal(number)
        # a signal during the worker's own end may be the cause of death
        await self._ended(earlier, (0, OUSTED, -number), f"{number.name} to the earlier {name}")

    async def _joined(self, name: str) -> None:
        deadline_s = time.monotonic() + JOIN_DEADLINE_S
        while REGISTERED not in self._system.log(name) and self._system.processes[name].poll() is None:
            if time.monotonic() > deadline_s:
                self._verdicts.fault("crashed", f"{name} did not join within {JOIN_DEADLINE_S:g} s")
                return
            await asyncio.sleep(POLL_S)

    async def _ended(self, process: Program, statuses: Sequence[int], why: str) -> None:
        deadline_s = time.monotonic() + END_DEADLINE_S
        while (status := process.poll()) is None:
            if time.monotonic() > deadline_s:
                self._verdicts.fault("crashed", f"{why}: pid {process.pid} goes on after {END_DEADLINE_S:g} s")
                process.kill()
                process.wait()
                return
            await asyncio.sleep(POLL_S)
        if status not in statuses:
            self._verdicts.fault("crashed", f"{why}: pid {process.pid} ended with {status}, not {statuses}")

    async def _watch(self) -> None:
        """Report a worker that ends unbidden and start another in its place, as a supervisor would.

        Raises RuntimeError if the router or a memory server ends.
        """
        while True:
            for name in self._workers:
                if self._locks[name].locked():
                    continue
                if (status := self._system.processes[name].poll()) is not None:
                    self._verdicts.fault("crashed", f"{name} ended by itself with {status}")
                    self.start(name)
            for name in ("router", *self.memories):
                process = self._system.processes.get(name)  # None during a replacement
                if process is not None and (status := process.poll()) is not None:
                    raise RuntimeError(f"{name} ended with {status}\n{self._system.log(name)[-5000:]}")
            await asyncio.sleep(POLL_S)
