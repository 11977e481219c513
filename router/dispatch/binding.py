"""Which completion goes to which workers next: late binding, by turn, and what is short ahead of its turn.

Where there are several pools of KV blocks and those that have the beginning of whose turn it is are busy, others pass
whose beginning is where there is room: nothing is computed twice for want of a place. Nobody is passed by more than so
many tokens.
"""

from collections.abc import Iterator
from hashlib import blake2b
from itertools import islice

from common.wire.messages.handoff import DecodeRequest
from common.wire.messages.worker import PrefillRequest
from common.wire.values.packing import pack_ids
from router.dispatch.request_state import Completion
from router.dispatch.waiting_queue import WaitingQueue
from router.placement.choice import awaits_trial, choose, may_overtake
from router.placement.route import LEAST, Demand, Route
from router.placement.worker_pool import WorkerPool

MAX_TRIED = 8
"""Short prompts that are tried ahead of their turn when the shortest finds no worker."""
MAX_LOOKED_AT, MOST_LOOKED_AT = 16, 32_768
"""Prompts in the queue, and their tokens, for who may pass: as long as that takes streams wait."""
WASTED_TOKENS = 512
"""That are computed again where there is room, so that others are looked for; and that these find there."""
MOST_PASSING_TOKENS = 32_768
"""Computed of those that pass one prompt: four full steps."""


def starts(queue: WaitingQueue, pool: WorkerPool) -> Iterator[tuple[Completion, Route]]:
    """What some pair of workers has room for; each is to be taken from the queue and assigned before the next is asked.

    What no pair with room takes, being too long for it, lets others pass, and so does what would be computed again
    there (see `_passing`). For a trial all wait, so that some pair comes to have nothing that has not got on; then only
    what could use that one waits.
    """
    refused: list[Demand] = []
    for completion in queue.by_turn():
        demand = completion.demand()
        if any(demand.covers(other) for other in refused):
            continue
        route = choose(pool, demand)
        while route is not None and (start := _passing(completion, route, queue, pool)) is not None:
            completion.num_passing += start[1].cost.num_computed
            yield start
            route = choose(pool, demand)
        if route is not None:
            yield completion, route
        elif choose(pool, LEAST) is None:
            break
        elif awaits_trial(pool, demand):
            return
        else:
            refused.append(demand)
    while (start := _ahead(queue, pool)) is not None:
        yield start


def _passing(first: Completion, route: Route, queue: WaitingQueue, pool: WorkerPool) -> tuple[Completion, Route] | None:
    """Who passes one whose turn it is: behind it in its order, and nowhere is more of it than where there is room.

    None where `first` itself finds enough there, or has let enough pass.
    """
    is_patient = first.num_passing < MOST_PASSING_TOKENS and not first.is_suspect
    if not is_patient or route.num_wasted <= WASTED_TOKENS:
        return None
    num_left = MOST_LOOKED_AT
    for completion in islice(queue.by_turn(), MAX_LOOKED_AT):
        if completion is first or completion.priority != first.priority:
            continue
        other = choose(pool, completion.demand())
        if other is not None and other.cost.num_expected > WASTED_TOKENS and not other.num_wasted:
            return completion, other
        num_left -= completion.num_tokens
        if num_left <= 0:
            break
    return None


def _ahead(queue: WaitingQueue, pool: WorkerPool) -> tuple[Completion, Route] | None:
    shortest = queue.shortest(MAX_TRIED)
    if not shortest or not may_overtake(pool, shortest[0].demand()):
        return None
    for completion in shortest:
        if (route := choose(pool, completion.demand(), overtakes=True)) is not None:
            return completion, route
    return None


def prefill_request(completion: Completion, route: Route, whole_gpu: bool) -> PrefillRequest:
    """What its prefill worker is sent: what it has put out so far is part of the prompt, what is known is not asked."""
    log = completion.prompt_log
    return PrefillRequest(
        request_id=completion.request_id,
        attempt=completion.attempt.number,
        token_ids=pack_ids(completion.prompt_ids) + pack_ids(completion.outputs),
        num_outputs=len(completion.outputs),
        sampling=completion.sampling,
        decode_worker_id=route.decode.id,
        decode_epoch=route.decode.epoch,
        whole_gpu=whole_gpu,
        priority=completion.priority,
        turn=completion.turn,
        client=client_id(completion.client),
        num_prompt_logprobs=0 if log is None or log.is_complete else log.num_wanted,
        first_scored=0 if log is None else log.num_known,
        salt=completion.salt,
        holder_worker_id=route.holder.id if route.holder else "",
        holder_epoch=route.holder.epoch if route.holder else 0,
        most_tokens=route.most_tokens,
    )


def decode_request(request: PrefillRequest) -> DecodeRequest:
    """Return what the decode worker is sent ahead of a prompt that a prefill worker computes."""
    return DecodeRequest(
        request_id=request.request_id,
        attempt=request.attempt,
        token_ids=request.token_ids,
        num_outputs=request.num_outputs,
        sampling=request.sampling,
        priority=request.priority,
        client=request.client,
    )


def client_id(client: str) -> int:
    """Return the number by which workers know a client; 0 for clients that do not say who they are."""
    return int.from_bytes(blake2b(client.encode(), digest_size=8).digest()) >> 1 if client else 0
