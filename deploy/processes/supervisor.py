"""Supervisor of the router and the workers of a machine: keeps processes running, reports readiness, ends processes in
order.

Invariant: whatever ends the supervisor ends all children: a drain, a second Ctrl-C, a failed start, or death of the
supervisor (see `exec_child`). A child is started again after a crash or a shortage of resources. Everything ends if a
child has wrong settings, or keeps crashing before the system was ever ready.
"""

import asyncio
import signal
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial

from common.base.json_file import JsonObject
from deploy.operate.health import fetch_health, is_complete, pids
from deploy.operate.healthcheck import NOT_OURS
from deploy.processes.console import Console
from deploy.processes.forks import ForkServer
from deploy.processes.keeper import Deadlines, Keeper, Lifetime
from deploy.processes.launch_plan import ProcessSpec

POLL_INTERVAL_S = 0.05
NO_ANSWER = "the router does not answer"

Work = Callable[[], Coroutine[None, None, None]]


async def keep_until_stopped(
    life: Lifetime,
    keeper: Keeper,
    fork_server: ForkServer,
    specs: Sequence[ProcessSpec],
    works: Sequence[Work],
    console: Console,
) -> int:
    """Start `specs`, run `works` beside them until a signal or a failure, drain, and return the exit code."""
    is_protected = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # by nohup
    for number in (signal.SIGINT, signal.SIGTERM, *(() if is_protected else (signal.SIGHUP,))):
        asyncio.get_running_loop().add_signal_handler(number, life.stop)
    await fork_server.begin()
    for spec in specs:
        keeper.start(spec)
    others = [life.watched(work()) for work in works]
    try:
        await life.stopping.wait()
    finally:
        life.stopping.set()
        keeper.release()
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        console.end_loading()
        await fork_server.end()
        await keeper.end()
    if life.failure:
        console.say(life.failure, "E")
    return life.exit_code


class Supervisor:
    """Runner of `specs` until stopped; processes of `keeper` may change meanwhile.

    Args:
        fork_server: forks workers; begun here unless it was before, and ended after them.
    """

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        url: str,
        deadlines: Deadlines,
        environ: Mapping[str, str],
        console: Console,
        fork_server: ForkServer,
    ) -> None:
        self.health: JsonObject | None = None
        self._life = Lifetime()
        self.ready, self.stop, self.fail = self._life.ready, self._life.stop, self._life.fail
        self._fork_server = fork_server
        self.keeper = Keeper(self._life, deadlines, environ, console, fork_server)
        self._specs, self._url, self._start_s, self._console = specs, url, deadlines.start_s, console
        self._companions: list[Work] = []

    @property
    def failure(self) -> str:
        """Reason of the end; empty without a failure."""
        return self._life.failure

    def add_companion(self, work: Work) -> None:
        """Run `work` once all is ready, until cancelled before the drain."""
        self._companions.append(work)

    async def run(self, on_ready: Callable[[JsonObject], None]) -> int:
        """Start everything, call `on_ready` once, and return the exit code after the drain."""
        works = [partial(self._announce, on_ready), *(partial(self._once_ready, each) for each in self._companions)]
        return await keep_until_stopped(self._life, self.keeper, self._fork_server, self._specs, works, self._console)

    async def _once_ready(self, work: Work) -> None:
        await self.ready.wait()
        await work()

    async def _announce(self, on_ready: Callable[[JsonObject], None]) -> None:
        deadline_s = time.monotonic() + self._start_s
        reason = NO_ANSWER
        import aiohttp  # here, because a sixth of a second passes, in which processes start

        async with aiohttp.ClientSession() as session:
            while time.monotonic() < deadline_s:
                health = await fetch_health(session, self._url)
                if health is not None and not (reason := self._missing(health)):
                    self.health = health
                    self.ready.set()
                    self._console.end_loading()
                    on_ready(health)
                    return
                await asyncio.sleep(POLL_INTERVAL_S)
        self.fail(f"not ready after {self._start_s:g} s: {reason}")

    def _missing(self, health: JsonObject) -> str:
        """Say what is missing of a system with all our workers, whose router then has the port; "" for nothing."""
        try:
            if is_complete(health) and pids(health).issuperset(self.keeper.worker_pids):
                return ""
            return "; ".join(health["problems"]) or "workers or KV paths are missing"
        except NOT_OURS:
            return NO_ANSWER
