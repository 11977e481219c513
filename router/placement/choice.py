"""Choice of the pair for the next request, among all registered workers."""

from bisect import bisect_right
from dataclasses import replace

from common.wire.messages.worker import Role
from router.placement.capacity import takers
from router.placement.costs import Costs
from router.placement.local_prefill import own_route
from router.placement.member import NO_TRANSPORT, Member
from router.placement.pairing import Pairing
from router.placement.route import Demand, Route
from router.placement.worker_pool import WorkerPool

MEETING_S = 3.0
"""Seconds for two new workers to prove their path; prompts wait meanwhile."""


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
        return own_route((*decodes, *alone), demand, costs, None)
    num_decodes = sum(worker.ready.role is Role.DECODE for worker in pool)
    pair, num_pairs = Pairing(with_room, num_decodes, pool.paths, demand, costs).best(decodes, alone_with_room)
    if pair is not None:
        prefill, decode = pair
        num_blocks = decode.ready.kv_layout.most_blocks(demand.expected_tokens, 1)
        cost, holder = costs.of(pair), costs.holder_for(prefill)
        least = min(costs.prompt(worker).num_computed for worker in (*prefills, *alone))  # with or without room
        route = Route(prefill, decode, num_blocks, overtakes, cost, num_pairs, holder, cost.num_computed - least)
    return own_route((*decodes, *alone), demand, costs, route) or route


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
    proven. A new worker gets `MEETING_S` to prove a path.
    """
    decodes = [w for w in takers(pool, Role.DECODE) if demand.max_total_tokens <= w.ready.max_model_len]
    decodes = [worker for worker in decodes if _is_open(worker, demand)]
    fitting = [w for w in takers(pool, Role.PREFILL) if demand.num_tokens <= w.ready.max_model_len]
    prefills = [worker for worker in fitting if not pool.paths.partners(worker).isdisjoint(decodes)]
    if not prefills and not any(_are_meeting(pool, prefill, decode) for prefill in fitting for decode in decodes):
        return [], [], decodes
    taking = [worker for worker in decodes if worker.ready.transport != NO_TRANSPORT]
    alone = [worker for worker in decodes if worker.ready.transport == NO_TRANSPORT]
    return [worker for worker in prefills if _is_open(worker, demand)], taking, alone


def _are_meeting(pool: WorkerPool, prefill: Member, decode: Member) -> bool:
    is_tried = pool.paths.find(prefill, decode) is not None
    since_s = max(prefill.joined_s, decode.joined_s)
    return not is_tried and decode.ready.transport != NO_TRANSPORT and pool.clock() - since_s < MEETING_S


def _is_open(worker: Member, demand: Demand) -> bool:
    work = worker.work
    return not (worker.silent or work.has_trial or (demand.is_trial and work.num_unproven))
