"""Short prompts computed by a decode worker although prefill workers exist, because waiting there takes longer.

A busy prefill worker has two steps launched, so an arriving prompt joins the third step. A step over long prompts takes
about 0.1 s. A decode worker with almost all of a prompt cached could compute the few missing tokens several times over
in 0.1 s.

The streams of the decode worker pause once for such a prompt. So a decode worker takes one at a time, and none with
more missing tokens than `decode.short_prompt_tokens`. The decode worker gives a prompt back if less is cached than
expected.
"""

import math
from collections.abc import Iterable

from router.placement.costs import Costs
from router.placement.member import Member
from router.placement.route import Demand, Route

STEPS_AHEAD = 2
"""Steps of a busy prefill worker before a new prompt's: the running step and the next."""


def own_route(decodes: Iterable[Member], demand: Demand, costs: Costs, trip: Route | None) -> Route | None:
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
