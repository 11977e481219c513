"""Registry of live workers and KV paths.

Knows no sockets and no requests. Invariant: a worker is registered under a single epoch at a time. Its counters cover
exactly the sequences assigned to that incarnation and not yet released.
"""

import logging
import time
from bisect import insort
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from common.settings.config import NetSection
from common.wire.messages.worker import Heartbeat, KVPathReport, Role, WorkerReady
from common.wire.values.pool_shape import minus, plus
from router.placement.kv_paths import KVPaths
from router.placement.member import Member
from router.placement.prefix_map import PrefixMap
from router.placement.readiness import Readiness, ReadinessLog, readiness_of
from router.placement.roster import Roster
from router.placement.route import Route
from router.placement.standby import Standbys

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Loss:
    """A worker to be removed, and the reason."""

    worker: Member
    reason: str
    stuck: bool = False


class Ledger:
    """Keeper of `Member.work`; every assigned sequence is uncounted once."""

    def __init__(self) -> None:
        self._turn = 0

    def assign(self, route: Route, num_tokens: int, *, is_trial: bool = False) -> None:
        """Count a sequence sent to a route.

        Args:
            num_tokens: prompt tokens of the sequence.
        """
        for worker in route.workers:
            worker.work.num_unproven += 1
            worker.work.has_trial = is_trial
        self._turn += 1
        route.prefill.last_turn = route.decode.last_turn = self._turn
        prompts, rows = route.prefill.work, route.decode.work
        prompts.outstanding_tokens += num_tokens
        prompts.num_outstanding += 1
        if route.overtakes:
            insort(prompts.overtaking, num_tokens)
        rows.num_assigned += 1
        rows.expected_blocks = plus(rows.expected_blocks, route.expected_blocks)

    def reduce_prompt(self, route: Route, num_tokens: int, num_left: int) -> None:
        """Reduce the counted prompt of an assigned sequence from `num_tokens` to `num_left` tokens to compute."""
        prompts = route.prefill.work
        prompts.outstanding_tokens -= num_tokens - num_left
        if route.overtakes:
            prompts.overtaking.remove(num_tokens)
            insort(prompts.overtaking, num_left)

    def release_prompt(self, route: Route, num_tokens: int) -> None:
        """Uncount the prompt of an assigned sequence, computed or given up."""
        prompts = route.prefill.work
        prompts.outstanding_tokens -= num_tokens
        prompts.num_outstanding -= 1
        if route.overtakes:
            prompts.overtaking.remove(num_tokens)

    def release(self, route: Route) -> None:
        """Uncount a sequence after `release_prompt`."""
        rows = route.decode.work
        rows.num_assigned -= 1
        rows.expected_blocks = minus(rows.expected_blocks, route.expected_blocks)

    def prove(self, route: Route) -> None:
        """Count a sequence as proven because of its progress; ends a trial."""
        for worker in route.workers:
            worker.work.num_unproven -= 1
            worker.work.has_trial = False


class WorkerPool:
    """All registered workers.

    Args:
        net: time limits.
        prefill_window: prompt tokens sent ahead to a prefill worker, in multiples of its step budget.
    """

    def __init__(self, net: NetSection, prefill_window: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._net, self.prefill_window, self.clock = net, prefill_window, clock
        self.roster = Roster(prefill_window)
        self._workers: dict[str, Member] = {}
        self._readiness_log = ReadinessLog(clock)
        self.paths = KVPaths(self.get)
        self.ledger = Ledger()
        self.prefixes = PrefixMap(clock)
        self.standbys = Standbys(self.paths.is_proven, clock)

    def __iter__(self) -> Iterator[Member]:
        return iter(self._workers.values())

    def find(self, worker_id: str) -> Member | None:
        return self._workers.get(worker_id)

    def get(self, worker_id: str, epoch: int) -> Member | None:
        """Return the registered worker with this id and epoch, None for any other incarnation."""
        worker = self._workers.get(worker_id)
        return worker if worker is not None and worker.epoch == epoch else None

    @property
    def readiness(self) -> Readiness:
        """Present status: whether a completion would be answered, busy workers included."""
        return readiness_of(self._workers.values(), self.paths)

    def add(self, ready: WorkerReady, now_s: float) -> Member:
        """Register a worker; the caller has removed any earlier incarnation."""
        worker = self._workers[ready.worker_id] = Member(ready, now_s, joined_s=now_s, changed=self.roster.changed)
        self.roster.add(worker)
        self.paths.add_worker(worker)
        worker.layout = self.prefixes.shared(worker.layout)
        self.prefixes.add(worker.pool, sum(ready.num_blocks), worker.layout)
        self.standbys.num_there += ready.standby > 0
        self._review(f"{worker} joined")
        return worker

    def drain(self, worker: Member) -> None:
        """Stop sending work to a leaving worker, known by a notice or by returned work; later calls change nothing."""
        if worker.draining:
            return
        worker.draining = True
        logger.info("%s is leaving; it gets nothing new", worker)
        self._review(f"{worker} is leaving")

    def beat(self, heartbeat: Heartbeat, now_s: float) -> bool:
        """Record a heartbeat; return False if the worker is unknown."""
        worker = self.get(heartbeat.worker_id, heartbeat.epoch)
        if worker is None:
            return False
        worker.speeds = worker.speeds.after(heartbeat, worker.beat)
        worker.beat, worker.last_seen_s = heartbeat, now_s
        if worker.silent:
            worker.silent = False
            self._review(f"{worker} speaks again")
        return True

    def remove(self, worker: Member) -> None:
        """Forget a worker, its path reports, and reports about its paths."""
        if self._workers.get(worker.id) is worker:
            del self._workers[worker.id]
            self.standbys.num_there -= worker.ready.standby > 0
        self.roster.remove(worker)
        self.paths.remove_worker(worker)
        self.prefixes.keep({other.pool for other in self})
        self._review(f"{worker} is gone")

    def set_path(self, report: KVPathReport) -> bool:
        """Record a KV path report; return False if the reporter is no registered decode worker, or nothing is new.

        The prefill worker may be unknown, because after a restart of the router either side registers first.
        """
        worker = self.get(report.worker_id, report.epoch)
        if worker is None or worker.ready.role is not Role.DECODE:
            return False
        takes_handoffs, num_failed = (
            any(each.is_serving for each in self.paths.partners(worker)),
            len(self.paths.failed),
        )
        if not self.paths.receive(report):
            return False
        is_further = takes_handoffs and not report.error and len(self.paths.failed) == num_failed
        if not is_further or self.standbys.num_there:
            self._review(f"the KV path {report.prefill_worker_id} -> {report.worker_id} was tried")
        return True

    def losses(self, now_s: float) -> list[Loss]:
        """Return workers silent for too long, or busy without a finished step for too long.

        Workers silent for half of the timeout are marked. So when many die at once, requests of a dead worker do not
        move to another dead worker.
        """
        lost = []
        self._readiness_log.check()
        for worker in self:
            silence_s = now_s - worker.last_seen_s
            if worker.silent != (silence_s > self._net.worker_timeout_s / 2):
                worker.silent = not worker.silent
                self._review(f"{worker} {'is silent' if worker.silent else 'speaks again'}")
            beat = worker.beat
            if silence_s > self._net.worker_timeout_s:
                limit = f"net.worker_timeout_s = {self._net.worker_timeout_s:g}"
                lost.append(Loss(worker, f"no heartbeat for {silence_s:.1f} s ({limit})"))
            elif beat and beat.num_running > 0 and beat.last_step_age_s > self._net.step_timeout_s:
                limit = f"net.step_timeout_s = {self._net.step_timeout_s:g}"
                lost.append(Loss(worker, f"stuck: no step for {beat.last_step_age_s:.1f} s ({limit})", stuck=True))
        return lost

    def _review(self, cause: str) -> None:
        self.standbys.review(self._workers.values(), cause)
        self._readiness_log.add(self.readiness, cause)


def forgive_silence(workers: Iterable[Member], now_s: float) -> None:
    """Restart all silence timers, after the router itself was suspended."""
    for worker in workers:
        worker.last_seen_s = now_s
