"""Prompts that a decode worker computes itself although there are prefill workers: short ones that would wait there.

A prefill worker has two steps launched, and what arrives is in the third. A step over long prompts takes a tenth of a
second, in which a decode worker that has all of a prompt but a few tokens computes these several times over. Its
streams wait for that once, so it takes one such prompt at a time, and none of which more tokens are to be computed than
it said (`decode.short_prompt_tokens`): should less be there than was expected, it gives the prompt back.
"""

import math
from collections.abc import Iterable

from router.placement.costs import Costs
from router.placement.member import Member
from router.placement.route import Demand, Route

STEPS_AHEAD = 2
"""Of a prefill worker that is busy: the one that runs and the one behind it."""


def own_route(decodes: Iterable[Member], demand: Demand, costs: Costs, trip: Route | None) -> Route | None:
    """The decode worker that is best sent a prompt by itself; None if none is, as a trip takes no longer.

    Args:
        trip: the best pair, if one has room.
    """
    if demand.takes_trip or demand.is_trial or (trip is not None and trip.is_local):
        return None
    fitting = [decode for decode in decodes if _may_keep(decode, demand, costs)]
    if not fitting:
        return None
    decode = min(fitting, key=lambda worker: (costs.of((worker, worker)).total, worker.last_turn))
    wait_s = _wait_s(trip.prefill) if trip is not None else math.inf
    if wait_s <= decode.chunk_s:
        return None
    saved = f"{wait_s * 1e3:.0f} ms of waiting for {trip.prefill.id}" if trip is not None else "waiting for a place"
    num_blocks = decode.ready.kv_layout.most_blocks(demand.expected_tokens, 1)
    cost = costs.of((decode, decode))
    return Route(decode, decode, num_blocks, cost=cost, saved=f"{decode.chunk_s * 1e3:.0f} ms there save {saved}")


def _may_keep(decode: Member, demand: Demand, costs: Costs) -> bool:
    """Whether it has a row, nothing else of the kind, and enough of the prompt."""
    most = decode.ready.short_prompt_tokens
    is_free = not decode.num_outstanding and decode.num_assigned < decode.ready.max_num_seqs
    is_known = decode.chunk_s > 0 and decode is not demand.avoided
    return most > 0 and is_free and is_known and costs.of((decode, decode)).num_computed <= most


def _wait_s(prefill: Member) -> float:
    """Until its next step begins."""
    return STEPS_AHEAD * prefill.step_s if prefill.outstanding_tokens else 0.0
