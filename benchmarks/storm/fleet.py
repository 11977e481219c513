"""The workers of a storm and their memory server: hit as planned, started again, and watched for other ends."""

import asyncio
import contextlib
import signal
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.storm.blows import MEMORY, Blow, Kind
from benchmarks.storm.clients import Verdicts
from tests.e2e.programs import Program
from tests.e2e.system import System

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

    A blow is left out for a worker still recovering from an earlier blow.
    """

    def __init__(self, system: System, workers: Mapping[str, int], verdicts: Verdicts) -> None:
        self.num = Counter[Kind]()
        self._system = system
        self._verdicts = verdicts
        self._workers = workers
        self._locks = {name: asyncio.Lock() for name in workers}
        self._num_starts = Counter[str]()

    def start(self, name: str) -> None:
        """Start a process, even if its name is in use; the earlier process's log is kept."""
        log = Path(self._system.directory.name) / f"{name}.log"
        if log.exists():
            self._num_starts[name] += 1
            log.rename(log.with_name(f"{name}.{self._num_starts[name]:03d}.log"))
        if name == MEMORY:
            self._system.start_memory()
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
        """Send SIGTERM to workers, then to the router, then to the memory server; all must end with status 0."""
        last = ("router", MEMORY)
        workers = [process for name, process in self._system.processes.items() if name not in last]
        for processes in (workers, *([self._system.processes[name]] for name in last)):
            for process in processes:
                process.send_signal(signal.SIGTERM)
            for process in processes:
                await self._ended(process, (0,), "the end of the storm")

    async def _hit(self, blow: Blow, name: str) -> None:
        if name == MEMORY:
            await (self._freeze(blow) if blow.kind is Kind.FREEZE else self._forget(blow))
            return
        if self._locks[name].locked():
            return
        async with self._locks[name]:
            self.num[blow.kind] += 1
            match blow.kind:
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

    async def _forget(self, blow: Blow) -> None:
        """Kill the memory server; workers finish their requests, and start again with the next server."""
        async with contextlib.AsyncExitStack() as stack:
            for lock in self._locks.values():
                await stack.enter_async_context(lock)
            self.num[blow.kind] += 1
            await self._end(MEMORY, signal.SIGKILL)
            self.start(MEMORY)
            for name in self._locks:
                await self._ended(self._system.processes.pop(name), (0,), f"{name} without its memory server")
                self.start(name)
            for name in self._locks:
                await self._joined(name)

    async def _freeze(self, blow: Blow) -> None:
        """Stop the memory server for a while, then start the workers that left because of the silence."""
        async with contextlib.AsyncExitStack() as stack:
            for lock in self._locks.values():
                await stack.enter_async_context(lock)
            self.num[blow.kind] += 1
            memory = self._system.processes[MEMORY]
            memory.send_signal(signal.SIGSTOP)
            await asyncio.sleep(blow.pause_s)
            memory.send_signal(signal.SIGCONT)
            await asyncio.sleep(NOTICED_S)
            left = [name for name in self._locks if LEFT in self._system.log(name)]
            for name in left:
                await self._ended(
                    self._system.processes.pop(name), (0,), f"{name} after {blow.pause_s:.1f} s of silence"
                )
                self.start(name)
            for name in left:
                await self._joined(name)

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

        Raises RuntimeError if the router or the memory server ends.
        """
        while True:
            for name, lock in self._locks.items():
                if not lock.locked() and (status := self._system.processes[name].poll()) is not None:
                    self._verdicts.fault("crashed", f"{name} ended by itself with {status}")
                    self.start(name)
            for name in ("router", MEMORY):
                process = self._system.processes.get(name)  # None during a replacement
                if process is not None and (status := process.poll()) is not None:
                    raise RuntimeError(f"{name} ended with {status}\n{self._system.log(name)[-5000:]}")
            await asyncio.sleep(POLL_S)
