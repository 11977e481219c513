"""Registry of live workers and KV paths; chooses the pair for the next request.

Knows no sockets and no requests. Invariant: a worker is registered under a single epoch at a time. Its counters cover
exactly the sequences assigned to that incarnation and not yet released.
"""

import logging
import time
from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from common.settings.config import NetSection
from common.wire.messages.worker import Heartbeat, KVPathReport, Role, WorkerReady
from common.wire.values.kv_layout import KVLayout
from common.wire.values.pool_shape import minus, plus
from router.placement.costs import Costs
from router.placement.kv_paths import KVPaths
from router.placement.local_prefill import own_route
from router.placement.member import NO_TRANSPORT, Member
from router.placement.pairing import Pairing
from router.placement.prefix_map import PrefixMap
from router.placement.readiness import Readiness, readiness_of
from router.placement.readiness_log import ReadinessLog
from router.placement.route import Demand, Route
from router.placement.standby import Standbys

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Loss:
    """A worker to be removed, and the reason."""

    worker: Member
    reason: str
    stuck: bool = False


MEETING_S = 3.0
"""Seconds for two new workers to prove their path; prompts wait meanwhile."""


class WorkerPool:
    """All registered workers.

    Args:
        net: time limits.
        prefill_window: prompt tokens sent ahead to a prefill worker, in multiples of its step budget.
    """

    def __init__(self, net: NetSection, prefill_window: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._net = net
        self._prefill_window = prefill_window
        self._workers: dict[str, Member] = {}
        self._paths = KVPaths(self.get)
        self._turn = 0
        self._clock = clock
        self._readiness_log = ReadinessLog(clock)
        self.prefixes = PrefixMap(clock)
        self.standbys = Standbys(self._paths.is_proven, clock)

    def __iter__(self) -> Iterator[Member]:
        return iter(self._workers.values())

    @property
    def paths(self) -> list[KVPathReport]:
        """Reports about paths from registered prefill workers."""
        return list(self._paths)

    def num_partners(self) -> Counter[str]:
        """Count, for each worker, the serving workers of the other role with a proven KV path."""
        serving = {worker for worker in self if worker.is_serving}
        return Counter({worker.id: len(self._paths.partners(worker) & serving) for worker in self})

    def find(self, worker_id: str) -> Member | None:
        return self._workers.get(worker_id)

    def get(self, worker_id: str, epoch: int) -> Member | None:
        """Return the registered worker with this id and epoch, None for any other incarnation."""
        worker = self._workers.get(worker_id)
        return worker if worker is not None and worker.epoch == epoch else None

    def max_model_len(self, limit: int) -> int:
        """Return `limit`, or less if no registered decode worker takes so many tokens.

        Standbys do not count: a length taken only by standbys is not promised. Requests too long for a standby wait for
        others.
        """
        decodes = [worker.ready for worker in self if worker.ready.role is Role.DECODE]
        lengths = [ready.max_model_len for ready in decodes if not ready.standby]
        return min(limit, max(lengths, default=limit))

    # --- registration ---------------------------------------------------------------------------

    def add(self, ready: WorkerReady, now_s: float) -> Member:
        """Register a worker; the caller has removed any earlier incarnation."""
        worker = self._workers[ready.worker_id] = Member(ready, now_s, joined_s=now_s)
        self._paths.join(worker)
        self.prefixes.meet(worker.pool, sum(ready.num_blocks))
        self._review(f"{worker} joined")
        return worker

    def drain(self, worker: Member) -> None:
        """Stop sending work to a leaving worker, told by a notice or by returned work; later calls change nothing."""
        if worker.draining:
            return
        worker.draining = True
        logger.info("%s is leaving; it gets nothing new", worker)
        self._review(f"{worker} is leaving")

    def beat(self, heartbeat: Heartbeat, now_s: float) -> bool:
        """Note a heartbeat; return False if the worker is unknown."""
        worker = self.get(heartbeat.worker_id, heartbeat.epoch)
        if worker is None:
            return False
        worker.note(heartbeat)
        worker.last_seen_s = now_s
        if worker.silent:
            worker.silent = False
            self._review(f"{worker} speaks again")
        return True

    def remove(self, worker: Member) -> None:
        """Forget a worker, its path reports, and reports about its paths."""
        if self._workers.get(worker.id) is worker:
            del self._workers[worker.id]
        self._paths.leave(worker)
        self.prefixes.keep({other.pool for other in self})
        self._review(f"{worker} is gone")

    def set_path(self, report: KVPathReport) -> bool:
        """Note a KV path report; return False if the reporter is no registered decode worker, or nothing is new.

        The prefill worker may be unknown, because after a restart of the router either side registers first.
        """
        worker = self.get(report.worker_id, report.epoch)
        if worker is None or worker.ready.role is not Role.DECODE or not self._paths.note(report):
            return False
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

    def forgive_silence(self, now_s: float) -> None:
        """Restart all silence timers, after the router itself was suspended."""
        for worker in self:
            worker.last_seen_s = now_s

    # --- choice ---------------------------------------------------------------------------------

    def choose(self, demand: Demand, *, overtakes: bool = False) -> Route | None:
        """Return the cheapest pair with room for a demand, None if no pair has room now.

        The cost counts prompt tokens to compute, including prompts already waiting at the worker. Moved KV and load
        count as additional tokens. So a request goes to its cached prefix, unless waiting costs more than the prefix
        saves.

        With `overtakes`, a prompt may go to a worker whose waiting prompts are longer. A worker gets such prompts for a
        single step beyond its window. Longer prompts do not count in the limit, because the shortest are computed
        first.
        """
        has_room = self._has_room_ahead if overtakes else self._has_room
        prefills, decodes, alone = self._who_may(demand)
        costs, route = Costs(demand, self.prefixes, self._paths, self), None
        with_room, alone_with_room = ([w for w in workers if has_room(w, demand)] for workers in (prefills, alone))
        if not (with_room or alone_with_room):  # return early: in an overload this is the common case
            return own_route((*decodes, *alone), demand, costs, None)
        num_decodes = sum(worker.ready.role is Role.DECODE for worker in self)
        pairing = Pairing(with_room, num_decodes, self._paths, demand, costs)
        pair, num_pairs = pairing.best(decodes, alone_with_room)
        if pair is not None:
            prefill, decode = pair
            num_blocks = decode.ready.kv_layout.most_blocks(demand.expected_tokens, 1)
            cost, holder = costs.of(pair), costs.holder_for(prefill)
            least = min(costs.prompt(worker).num_computed for worker in (*prefills, *alone))  # with or without room
            route = Route(prefill, decode, num_blocks, overtakes, cost, num_pairs, holder, cost.num_computed - least)
        return own_route((*decodes, *alone), demand, costs, route) or route

    def may_overtake(self, shortest: Demand) -> bool:
        """Tell whether any prompt may be sent ahead of its turn, given the shortest waiting prompt."""
        return any(worker.ready.short_prompt_tokens or self._has_room_ahead(worker, shortest) for worker in self)

    @property
    def has_choice(self) -> bool:
        """True if the place of cached prefixes can influence a choice."""
        return len({worker.pool for worker in self}) > 1 or any(worker.ready.short_prompt_tokens for worker in self)

    def layouts(self) -> set[KVLayout]:
        """Return layouts of reusable blocks; none if their place cannot influence a choice."""
        if not self.has_choice:
            return set()
        return {worker.ready.kv_layout for worker in self if worker.ready.kv_layout.is_reusable}

    def transport(self, route: Route) -> str:
        """Return the transport of KV blocks along a route, "none" for a worker that does both."""
        prefill, decode = route.prefill, route.decode
        path = self._paths.find(prefill, decode)
        return NO_TRANSPORT if path is None else path.transport

    def longest(self) -> int:
        """Return the most tokens, prompt and outputs together, that some worker takes."""
        return max((worker.ready.max_model_len for worker in self._takers(Role.DECODE)), default=0)

    @property
    def readiness(self) -> Readiness:
        """Present status: whether a completion would be answered, busy workers included."""
        return readiness_of(self._workers.values(), self._paths)

    def awaits_trial(self, demand: Demand) -> bool:
        """Tell whether only unproven sequences keep a trial from a pair with room, and no other trial runs."""
        if not demand.is_trial or any(worker.has_trial for worker in self):
            return False
        return self.choose(replace(demand, is_trial=False)) is not None

    def assign(self, route: Route, num_tokens: int, *, is_trial: bool = False) -> None:
        """Count a sequence sent to a route.

        Args:
            num_tokens: prompt tokens of the sequence.
        """
        for worker in route.workers:
            worker.num_unproven += 1
            worker.has_trial = is_trial
        self._turn += 1
        route.prefill.last_turn = route.decode.last_turn = self._turn
        route.prefill.outstanding_tokens += num_tokens
        route.prefill.num_outstanding += 1
        if route.overtakes:
            insort(route.prefill.overtaking, num_tokens)
        route.decode.num_assigned += 1
        route.decode.expected_blocks = plus(route.decode.expected_blocks, route.expected_blocks)

    def lighten_prompt(self, route: Route, num_tokens: int, num_left: int) -> None:
        """Reduce the counted prompt of an assigned sequence from `num_tokens` to `num_left` tokens to compute."""
        route.prefill.outstanding_tokens -= num_tokens - num_left
        if route.overtakes:
            route.prefill.overtaking.remove(num_tokens)
            insort(route.prefill.overtaking, num_left)

    def release_prompt(self, route: Route, num_tokens: int) -> None:
        """Uncount the prompt of an assigned sequence, computed or given up."""
        route.prefill.outstanding_tokens -= num_tokens
        route.prefill.num_outstanding -= 1
        if route.overtakes:
            route.prefill.overtaking.remove(num_tokens)

    def release(self, route: Route) -> None:
        """Uncount a sequence after `release_prompt`."""
        route.decode.num_assigned -= 1
        route.decode.expected_blocks = minus(route.decode.expected_blocks, route.expected_blocks)

    def prove(self, route: Route) -> None:
        """Count a sequence as proven because of its progress; ends a trial."""
        for worker in route.workers:
            worker.num_unproven -= 1
            worker.has_trial = False

    def has_gpu_alone(self, route: Route) -> bool:
        """Tell whether the prompt's GPU decodes no sequence but the route's own."""
        decodes = [worker for worker in self if worker.ready.role is Role.DECODE and worker.gpu == route.prefill.gpu]
        return sum(worker.num_assigned for worker in decodes) == (route.decode in decodes)

    def num_prompt_gpus(self) -> int:
        """Count GPUs, or CPUs, that compute prompts."""
        workers = self._takers(Role.PREFILL) or self._takers(Role.DECODE)
        return len({worker.gpu for worker in workers})

    def _review(self, cause: str) -> None:
        self.standbys.review(self._workers.values(), cause)
        self._readiness_log.note(self.readiness, cause)

    def _takers(self, role: Role) -> list[Member]:
        """Return workers of a role open for new work; a prefill worker without handoffs is useless."""
        return [
            worker
            for worker in self
            if worker.ready.role is role
            and not (worker.draining or worker.in_reserve)
            and (role is Role.DECODE or worker.ready.transport != NO_TRANSPORT)
        ]

    def _who_may(self, demand: Demand) -> tuple[list[Member], list[Member], list[Member]]:
        """Return fitting prefill workers, decode workers taking handoffs, and decode workers computing prompts alone.

        A decode worker works alone if it takes no handoffs. All work alone if no path to any is proven or about to be
        proven. A new worker gets `MEETING_S` to prove a path.
        """
        decodes = [w for w in self._takers(Role.DECODE) if demand.max_total_tokens <= w.ready.max_model_len]
        decodes = [worker for worker in decodes if _is_open(worker, demand)]
        fitting = [w for w in self._takers(Role.PREFILL) if demand.num_tokens <= w.ready.max_model_len]
        prefills = [worker for worker in fitting if not self._paths.partners(worker).isdisjoint(decodes)]
        if not prefills and not any(self._are_meeting(prefill, decode) for prefill in fitting for decode in decodes):
            return [], [], decodes
        taking = [worker for worker in decodes if worker.ready.transport != NO_TRANSPORT]
        alone = [worker for worker in decodes if worker.ready.transport == NO_TRANSPORT]
        return [worker for worker in prefills if _is_open(worker, demand)], taking, alone

    def _are_meeting(self, prefill: Member, decode: Member) -> bool:
        is_tried = self._paths.find(prefill, decode) is not None
        since_s = max(prefill.joined_s, decode.joined_s)
        return not is_tried and decode.ready.transport != NO_TRANSPORT and self._clock() - since_s < MEETING_S

    def _has_room(self, worker: Member, _: Demand) -> bool:
        if worker.ready.role is Role.DECODE:
            return worker.num_assigned < worker.ready.max_num_seqs
        by_turn = worker.outstanding_tokens - sum(worker.overtaking)
        return by_turn < self._prefill_window * worker.ready.max_batch_tokens

    def _has_room_ahead(self, worker: Member, demand: Demand) -> bool:
        """Tell whether a prompt may be sent to a worker ahead of its turn; never to a worker without a step budget."""
        is_shorter = demand.num_tokens * worker.num_outstanding < worker.outstanding_tokens
        before = worker.overtaking[: bisect_right(worker.overtaking, demand.num_tokens)]
        return is_shorter and sum(before) < worker.ready.max_batch_tokens


def _is_open(worker: Member, demand: Demand) -> bool:
    return not (worker.silent or worker.has_trial or (demand.is_trial and worker.num_unproven))
