"""Who is alive, which KV paths work, and which pair gets the next request.

Knows no sockets and no requests. Invariant: a worker is in the pool under one epoch at a time, and
its counters cover exactly what was assigned to that incarnation and not yet given back.
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
    """A worker that is to be removed, and why."""

    worker: Member
    reason: str
    stuck: bool = False


MEETING_S = 3.0
"""For a prefill and a decode worker to prove their path, once both are here: until then prompts wait for that."""


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
        """What decode workers said of the ways to prefill workers that are registered now."""
        return list(self._paths)

    def num_partners(self) -> Counter[str]:
        """By worker, those of the other role that serve and with which its KV path is proven."""
        serving = {worker for worker in self if worker.is_serving}
        return Counter({worker.id: len(self._paths.partners(worker) & serving) for worker in self})

    def find(self, worker_id: str) -> Member | None:
        return self._workers.get(worker_id)

    def get(self, worker_id: str, epoch: int) -> Member | None:
        """That very incarnation, if it is registered."""
        worker = self._workers.get(worker_id)
        return worker if worker is not None and worker.epoch == epoch else None

    def max_model_len(self, limit: int) -> int:
        """`limit`, or less when no registered decode worker takes that many tokens.

        Standbys do not count: what only they take is not promised, and what they do not take waits for the others.
        """
        decodes = [worker.ready for worker in self if worker.ready.role is Role.DECODE]
        lengths = [ready.max_model_len for ready in decodes if not ready.standby]
        return min(limit, max(lengths, default=limit))

    # --- coming and going -----------------------------------------------------------------------

    def add(self, ready: WorkerReady, now_s: float) -> Member:
        """Register; the caller has removed an earlier incarnation."""
        worker = self._workers[ready.worker_id] = Member(ready, now_s, joined_s=now_s)
        self._paths.join(worker)
        self.prefixes.meet(worker.pool, sum(ready.num_blocks))
        self._review(f"{worker} joined")
        return worker

    def drain(self, worker: Member) -> None:
        """It leaves, as it says itself or by what it gives back, whichever comes first: nothing new is sent there."""
        if worker.draining:
            return
        worker.draining = True
        logger.info("%s is leaving; it gets nothing new", worker)
        self._review(f"{worker} is leaving")

    def beat(self, heartbeat: Heartbeat, now_s: float) -> bool:
        """Note a sign of life; False when it comes from somebody unknown."""
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
        """Forget it and what it said of KV paths, and what others said of paths to it."""
        if self._workers.get(worker.id) is worker:
            del self._workers[worker.id]
        self._paths.leave(worker)
        self.prefixes.keep({other.pool for other in self})
        self._review(f"{worker} is gone")

    def set_path(self, report: KVPathReport) -> bool:
        """Note how blocks travel; False when it does not come from a decode worker, or says what it said before.

        The prefill worker may be unknown for now: after a restart of the router either comes first.
        """
        worker = self.get(report.worker_id, report.epoch)
        if worker is None or worker.ready.role is not Role.DECODE or not self._paths.note(report):
            return False
        self._review(f"the KV path {report.prefill_worker_id} -> {report.worker_id} was tried")
        return True

    def losses(self, now_s: float) -> list[Loss]:
        """Workers that are silent for too long, or busy without a finished step for too long.

        Those half way there are marked: when many die at once, one's requests must not go to the next.
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
        """The router itself was asleep: nobody's silence counts."""
        for worker in self:
            worker.last_seen_s = now_s

    # --- choice ---------------------------------------------------------------------------------

    def choose(self, demand: Demand, *, overtakes: bool = False) -> Route | None:
        """The pair with room for what is asked that has it done at the least cost; None when there is none now.

        The cost is prompt tokens to compute, of those who wait there too, and what lies elsewhere or is full counts as
        so many more. So what was computed before draws its like, but not to where others wait for longer than that
        saves.

        A prompt `overtakes` where it is shorter than those that are there. Beside its window a worker gets one step's
        worth of such prompts, longer ones not counted: the shortest are computed first, while all others wait.
        """
        has_room = self._has_room_ahead if overtakes else self._has_room
        prefills, decodes, alone = self._who_may(demand)
        costs, route = Costs(demand, self.prefixes, self._paths, self), None
        with_room, alone_with_room = ([w for w in workers if has_room(w, demand)] for workers in (prefills, alone))
        if not (with_room or alone_with_room):  # as mostly in an overload, in which this is asked again and again
            return own_route((*decodes, *alone), demand, costs, None)
        num_decodes = sum(worker.ready.role is Role.DECODE for worker in self)
        pairing = Pairing(with_room, num_decodes, self._paths, demand, costs)
        pair, num_pairs = pairing.best(decodes, alone_with_room)
        if pair is not None:
            prefill, decode = pair
            num_blocks = decode.ready.kv_layout.most_blocks(demand.expected_tokens, 1)
            cost, holder = costs.of(pair), costs.holder_for(prefill)
            least = min(costs.prompt(worker).num_computed for worker in (*prefills, *alone))  # with room or not
            route = Route(prefill, decode, num_blocks, overtakes, cost, num_pairs, holder, cost.num_computed - least)
        return own_route((*decodes, *alone), demand, costs, route) or route

    def may_overtake(self, shortest: Demand) -> bool:
        """Whether a prompt may be sent anywhere ahead of its turn; where the shortest may not, no other one may."""
        return any(worker.ready.short_prompt_tokens or self._has_room_ahead(worker, shortest) for worker in self)

    @property
    def has_choice(self) -> bool:
        """Whether it makes a difference what lies where."""
        return len({worker.pool for worker in self}) > 1 or any(worker.ready.short_prompt_tokens for worker in self)

    def layouts(self) -> set[KVLayout]:
        """Of blocks that may be found again, where it makes a difference in which pool they are."""
        if not self.has_choice:
            return set()
        return {worker.ready.kv_layout for worker in self if worker.ready.kv_layout.is_reusable}

    def transport(self, route: Route) -> str:
        """How KV blocks travel along a route; "none" where a worker does both."""
        prefill, decode = route.prefill, route.decode
        path = self._paths.find(prefill, decode)
        return NO_TRANSPORT if path is None else path.transport

    def longest(self) -> int:
        """Most tokens, prompt and outputs together, of a completion that some worker takes."""
        return max((worker.ready.max_model_len for worker in self._takers(Role.DECODE)), default=0)

    @property
    def readiness(self) -> Readiness:
        """Whether a completion would be answered now, be the workers busy or not."""
        return readiness_of(self._workers.values(), self._paths)

    def awaits_trial(self, demand: Demand) -> bool:
        """Whether a trial would have a pair with room, but for what is unproven there, and no other is going on."""
        if not demand.is_trial or any(worker.has_trial for worker in self):
            return False
        return self.choose(replace(demand, is_trial=False)) is not None

    def assign(self, route: Route, num_tokens: int, *, is_trial: bool = False) -> None:
        """Count one sequence of `num_tokens` prompt tokens on its way."""
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
        """Of the prompt of an assigned sequence, so long as it was thought to be, no more than that is computed."""
        route.prefill.outstanding_tokens -= num_tokens - num_left
        if route.overtakes:
            route.prefill.overtaking.remove(num_tokens)
            insort(route.prefill.overtaking, num_left)

    def release_prompt(self, route: Route, num_tokens: int) -> None:
        """The prompt of an assigned sequence is computed, or given up."""
        route.prefill.outstanding_tokens -= num_tokens
        route.prefill.num_outstanding -= 1
        if route.overtakes:
            route.prefill.overtaking.remove(num_tokens)

    def release(self, route: Route) -> None:
        """One sequence less, whose prompt was released before."""
        route.decode.num_assigned -= 1
        route.decode.expected_blocks = minus(route.decode.expected_blocks, route.expected_blocks)

    def prove(self, route: Route) -> None:
        """One sequence less that has not got on: the one on trial, if there is one."""
        for worker in route.workers:
            worker.num_unproven -= 1
            worker.has_trial = False

    def has_gpu_alone(self, route: Route) -> bool:
        """Whether the GPU that computes the prompt of an assigned route has no sequence to decode but that."""
        decodes = [worker for worker in self if worker.ready.role is Role.DECODE and worker.gpu == route.prefill.gpu]
        return sum(worker.num_assigned for worker in decodes) == (route.decode in decodes)

    def num_prompt_gpus(self) -> int:
        """GPUs, or CPUs, that compute prompts."""
        workers = self._takers(Role.PREFILL) or self._takers(Role.DECODE)
        return len({worker.gpu for worker in workers})

    def _review(self, cause: str) -> None:
        self.standbys.review(self._workers.values(), cause)
        self._readiness_log.note(self.readiness, cause)

    def _takers(self, role: Role) -> list[Member]:
        """Workers of one role that take new work; a prefill worker that hands nothing off is of no use."""
        return [
            worker
            for worker in self
            if worker.ready.role is role
            and not (worker.draining or worker.in_reserve)
            and (role is Role.DECODE or worker.ready.transport != NO_TRANSPORT)
        ]

    def _who_may(self, demand: Demand) -> tuple[list[Member], list[Member], list[Member]]:
        """Prefill workers that can compute what is asked for, decode workers that take it from them, and those alone.

        A decode worker does both alone if it takes no handoffs, or while no path to any decode worker is proven or
        about to be: a worker that has just come has met nobody yet.
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
        """Whether a prompt may be sent there ahead of its turn; never to a worker without a step budget."""
        is_shorter = demand.num_tokens * worker.num_outstanding < worker.outstanding_tokens
        before = worker.overtaking[: bisect_right(worker.overtaking, demand.num_tokens)]
        return is_shorter and sum(before) < worker.ready.max_batch_tokens


def _is_open(worker: Member, demand: Demand) -> bool:
    return not (worker.silent or worker.has_trial or (demand.is_trial and worker.num_unproven))
