"""Choice of the pair for the next request, among all registered workers.

A decode worker may compute a short prompt itself although prefill workers exist, because waiting there takes longer. A
busy prefill worker has two steps launched, so an arriving prompt joins the third step. A step over long prompts takes
about 0.1 s. A decode worker with almost all of a prompt cached could compute the few missing tokens several times over
in 0.1 s.

The streams of the decode worker pause once for such a prompt. So a decode worker takes one at a time, and none with
more missing tokens than `decode.short_prompt_tokens`. The decode worker gives a prompt back if less is cached than
expected.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import replace
from itertools import chain

from common.wire.messages.worker import Role
from router.placement.capacity import takers
from router.placement.costs import Costs
from router.placement.member import NO_TRANSPORT, Member
from router.placement.pairing import Pairing
from router.placement.roster import has_room_in_turn
from router.placement.route import Demand, Route
from router.placement.worker_pool import WorkerPool

FIRST_PATH_S = 3.0
"""Seconds for two new workers to prove their path; prompts wait meanwhile."""
STEPS_AHEAD = 2
"""Steps of a busy prefill worker before a new prompt's: the running step and the next."""


def choose(pool: WorkerPool, demand: Demand, *, overtakes: bool = False) -> Route | None:
    """Return the cheapest pair with room for a demand, None if no pair has room now.

    The cost counts prompt tokens to compute, including prompts already waiting at the worker. Moved KV and load count
    as additional tokens. So a request goes to its cached prefix, unless waiting costs more than the prefix saves.

    With `overtakes`, a prompt may go to a worker whose waiting prompts are longer. A worker gets such prompts for a
    single step beyond its window. Longer prompts do not count in the limit, because the shortest are computed first.
    """
    pool.roster.update()
    decodes, alone = _decodes(pool, demand)
    ready = _ahead_of_turn(pool, demand) if overtakes else pool.roster.with_room.workers
    with_room = _fitting(ready, demand.num_tokens, demand) if decodes else []
    alone_with_room = [worker for worker in alone if has_room(pool, worker, demand, overtakes=overtakes)]
    shorts = [decode for decode in chain(decodes, alone) if decode in pool.roster.shorts] if pool.roster.shorts else []
    if not (with_room or alone_with_room or shorts):  # in an overload this is the common case
        return None
    costs, route = Costs(demand, pool), None
    pair = Pairing(with_room, pool, demand, costs).best(decodes, alone_with_room)
    if pair is not None:
        prefill, decode = pair
        num_blocks = decode.ready.kv_layout.most_blocks(demand.expected_tokens, 1)
        num_pairs = pool.paths.count(with_room, decodes) + len(alone_with_room)
        cost, holder = costs.of(pair), costs.holder_for(prefill)
        num_wasted = cost.num_computed - _least_computed(pool, demand, costs, (decodes, alone), cost.num_computed)
        route = Route(prefill, decode, num_blocks, overtakes, cost, num_pairs, holder, num_wasted)
    return _own_route(shorts, demand, costs, route) or route


def may_overtake(pool: WorkerPool, shortest: Demand) -> bool:
    """Tell whether any prompt may be sent ahead of its turn, given the shortest waiting prompt."""
    return any(worker.ready.short_prompt_tokens or _has_room_ahead(worker, shortest) for worker in pool)


def awaits_trial(pool: WorkerPool, demand: Demand) -> bool:
    """Tell whether only unproven sequences keep a trial from a pair with room, and no other trial runs."""
    if not demand.is_trial or any(worker.work.has_trial for worker in pool):
        return False
    return choose(pool, replace(demand, is_trial=False)) is not None


def has_room(pool: WorkerPool, worker: Member, demand: Demand, *, overtakes: bool) -> bool:
    """Tell whether a worker takes a prompt now, in turn or ahead of its turn."""
    return _has_room_ahead(worker, demand) if overtakes else has_room_in_turn(worker, pool.prefill_window)


def _has_room_ahead(worker: Member, demand: Demand) -> bool:
    """Tell whether a prompt may be sent to a worker ahead of its turn; never to a worker without a step budget."""
    work = worker.work
    is_shorter = demand.num_tokens * work.num_outstanding < work.outstanding_tokens
    before = work.overtaking[: bisect_right(work.overtaking, demand.num_tokens)]
    return is_shorter and sum(before) < worker.ready.max_batch_tokens


def _ahead_of_turn(pool: WorkerPool, demand: Demand) -> list[Member]:
    """Return prefill workers that take a prompt ahead of its turn, by backlog."""
    workers = [worker for worker in pool.roster.prefills if _has_room_ahead(worker, demand)]
    return sorted(workers, key=lambda worker: (worker.work.outstanding_tokens, worker.last_turn, worker.number))


def _decodes(pool: WorkerPool, demand: Demand) -> tuple[list[Member], list[Member]]:
    """Return fitting decode workers taking handoffs, and those computing prompts alone, both by load.

    A decode worker works alone if it takes no handoffs. All work alone if no path to any is proven or about to be
    proven. A new worker gets `FIRST_PATH_S` to prove a path.
    """
    decodes = _fitting(pool.roster.decodes.workers, demand.max_total_tokens, demand)
    prefills = chain(pool.roster.prefills, takers(pool, Role.PREFILL))  # silent ones, too
    fitting = (worker for worker in prefills if demand.num_tokens <= worker.ready.max_model_len)
    if not any(_hands_over(pool, prefill, decodes) or _is_path_pending(pool, prefill, decodes) for prefill in fitting):
        return [], decodes
    if not (loners := pool.roster.loners):
        return decodes, []
    return [decode for decode in decodes if decode not in loners], [decode for decode in decodes if decode in loners]


def _fitting(workers: Iterable[Member], num_tokens: int, demand: Demand) -> list[Member]:
    """Return workers that hold `num_tokens`, and have no unproven sequence if the demand is a trial."""
    is_trial = demand.is_trial
    return [w for w in workers if num_tokens <= w.ready.max_model_len and not (is_trial and w.work.num_unproven)]


def _hands_over(pool: WorkerPool, prefill: Member, decodes: Iterable[Member]) -> bool:
    return not pool.paths.partners(prefill).isdisjoint(decodes)


def _least_computed(
    pool: WorkerPool, demand: Demand, costs: Costs, decodes: tuple[list[Member], list[Member]], least: int
) -> int:
    """Return the fewest prompt tokens that a worker with or without room would compute; of one they are `least`."""
    (taking, alone), prefills = decodes, pool.roster.prefills
    most = max(costs.most_held(Role.PREFILL), costs.most_held(Role.DECODE) if alone else costs.most_taken)
    if least > demand.num_tokens - most:
        fitting = _fitting(chain(costs.ahead()[0] & prefills.keys(), prefills), demand.num_tokens, demand)
        for worker in chain((prefill for prefill in fitting if _hands_over(pool, prefill, taking)), alone):
            if (least := min(least, costs.prompt(worker).num_computed)) == demand.num_tokens - most:
                break
    return least


def _is_path_pending(pool: WorkerPool, prefill: Member, decodes: Iterable[Member]) -> bool:
    """Tell whether a path to any decode worker is about to be proven."""
    now_s = pool.clock()
    return any(
        now_s - max(prefill.joined_s, decode.joined_s) < FIRST_PATH_S
        and decode.ready.transport != NO_TRANSPORT
        and pool.paths.find(prefill, decode) is None
        for decode in decodes
    )


def _own_route(decodes: Iterable[Member], demand: Demand, costs: Costs, trip: Route | None) -> Route | None:
    """Return a route to the best decode worker alone, or None if going through a prefill worker takes no longer.

    Args:
        trip: the best pair, None if no pair has room.
    """
    if demand.takes_trip or demand.is_trial or (trip is not None and trip.is_local):
        return None
    fitting = [decode for decode in decodes if _may_keep(decode, demand, costs)]
    if not fitting:
        return None
    decode = min(fitting, key=lambda worker: (costs.of((worker, worker)).total, worker.last_turn, worker.number))
    wait_s, own_s = _wait_s(trip.prefill) if trip is not None else math.inf, decode.speeds.short_prompt_s
    if wait_s <= own_s:
        return None
    there = f"{wait_s * 1e3:.0f} ms of waiting for {trip.prefill.id}" if trip is not None else "waiting for a place"
    saved = f"{own_s * 1e3:.0f} ms there save {there}"
    num_blocks = decode.ready.kv_layout.most_blocks(demand.expected_tokens, 1)
    return Route(decode, decode, num_blocks, cost=costs.of((decode, decode)), saved=saved)


def _may_keep(decode: Member, demand: Demand, costs: Costs) -> bool:
    """Tell whether a decode worker has a free row, no prompt of its own, and enough of the prompt cached."""
    most = decode.ready.short_prompt_tokens
    is_free = not decode.work.num_outstanding and decode.work.num_assigned < decode.ready.max_num_seqs
    is_known = decode.speeds.short_prompt_s > 0 and decode is not demand.avoided
    return is_free and is_known and costs.of((decode, decode)).num_computed <= most


def _wait_s(prefill: Member) -> float:
    """Return seconds until the next free step of a prefill worker begins."""
    return STEPS_AHEAD * prefill.speeds.step_s if prefill.work.outstanding_tokens else 0.0
