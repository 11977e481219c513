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

from common.wire.messages.worker import Role
from router.placement.capacity import takers
from router.placement.costs import Costs
from router.placement.member import NO_TRANSPORT, Member
from router.placement.pairing import Pairing
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
    prefills, decodes, alone = _who_may(pool, demand)
    costs, route = Costs(demand, pool), None
    with_room, alone_with_room = (
        [worker for worker in workers if has_room(pool, worker, demand, overtakes=overtakes)]
        for workers in (prefills, alone)
    )
    if not (with_room or alone_with_room):  # return early: in an overload this is the common case
        return _own_route((*decodes, *alone), demand, costs, None)
    num_decodes = sum(worker.ready.role is Role.DECODE for worker in pool)
    pair, num_pairs = Pairing(with_room, num_decodes, pool.paths, demand, costs).best(decodes, alone_with_room)
    if pair is not None:
        prefill, decode = pair
        num_blocks = decode.ready.kv_layout.most_blocks(demand.expected_tokens, 1)
        cost, holder = costs.of(pair), costs.holder_for(prefill)
        least = min(costs.prompt(worker).num_computed for worker in (*prefills, *alone))  # with or without room
        route = Route(prefill, decode, num_blocks, overtakes, cost, num_pairs, holder, cost.num_computed - least)
    return _own_route((*decodes, *alone), demand, costs, route) or route


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
    if overtakes:
        return _has_room_ahead(worker, demand)
    if worker.ready.role is Role.DECODE:
        return worker.work.num_assigned < worker.ready.max_num_seqs
    by_turn = worker.work.outstanding_tokens - sum(worker.work.overtaking)
    return by_turn < pool.prefill_window * worker.ready.max_batch_tokens


def _has_room_ahead(worker: Member, demand: Demand) -> bool:
    """Tell whether a prompt may be sent to a worker ahead of its turn; never to a worker without a step budget."""
    work = worker.work
    is_shorter = demand.num_tokens * work.num_outstanding < work.outstanding_tokens
    before = work.overtaking[: bisect_right(work.overtaking, demand.num_tokens)]
    return is_shorter and sum(before) < worker.ready.max_batch_tokens


def _who_may(pool: WorkerPool, demand: Demand) -> tuple[list[Member], list[Member], list[Member]]:
    """Return fitting prefill workers, decode workers taking handoffs, and decode workers computing prompts alone.

    A decode worker works alone if it takes no handoffs. All work alone if no path to any is proven or about to be
    proven. A new worker gets `FIRST_PATH_S` to prove a path.
    """
    decodes = [w for w in takers(pool, Role.DECODE) if demand.max_total_tokens <= w.ready.max_model_len]
    decodes = [worker for worker in decodes if _is_open(worker, demand)]
    fitting = [w for w in takers(pool, Role.PREFILL) if demand.num_tokens <= w.ready.max_model_len]
    prefills = [worker for worker in fitting if not pool.paths.partners(worker).isdisjoint(decodes)]
    if not prefills and not any(_is_path_pending(pool, prefill, decode) for prefill in fitting for decode in decodes):
        return [], [], decodes
    taking = [worker for worker in decodes if worker.ready.transport != NO_TRANSPORT]
    alone = [worker for worker in decodes if worker.ready.transport == NO_TRANSPORT]
    return [worker for worker in prefills if _is_open(worker, demand)], taking, alone


def _is_path_pending(pool: WorkerPool, prefill: Member, decode: Member) -> bool:
    is_tried = pool.paths.find(prefill, decode) is not None
    since_s = max(prefill.joined_s, decode.joined_s)
    return not is_tried and decode.ready.transport != NO_TRANSPORT and pool.clock() - since_s < FIRST_PATH_S


def _is_open(worker: Member, demand: Demand) -> bool:
    work = worker.work
    return not (worker.silent or work.has_trial or (demand.is_trial and work.num_unproven))


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
    decode = min(fitting, key=lambda worker: (costs.of((worker, worker)).total, worker.last_turn))
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
    return most > 0 and is_free and is_known and costs.of((decode, decode)).num_computed <= most


def _wait_s(prefill: Member) -> float:
    """Return seconds until the next free step of a prefill worker begins."""
    return STEPS_AHEAD * prefill.speeds.step_s if prefill.work.outstanding_tokens else 0.0
