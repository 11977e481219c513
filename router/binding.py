"""Which completion goes to which workers next: late binding, by turn, and what is short ahead of its turn."""

from collections.abc import Iterator

from common.wire.messages import PrefillRequest
from common.wire.packing import pack_ids
from router.request_state import Completion
from router.route import LEAST, Demand, Route
from router.waiting_queue import WaitingQueue
from router.worker_pool import WorkerPool

MAX_TRIED = 8
"""Short prompts that are tried ahead of their turn when the shortest finds no worker."""


def starts(queue: WaitingQueue, pool: WorkerPool) -> Iterator[tuple[Completion, Route]]:
    """What some pair of workers has room for; each is to be taken from the queue and assigned before the next is asked.

    What no pair with room takes, being too long for it, lets others pass. For a trial all wait, so that some pair
    comes to have nothing that has not got on; then only what could use that one waits.
    """
    refused: list[Demand] = []
    for completion in queue.by_turn():
        demand = completion.demand()
        if any(demand.covers(other) for other in refused):
            continue
        if (route := pool.choose(demand)) is not None:
            yield completion, route
        elif pool.choose(LEAST) is None:
            break
        elif pool.awaits_trial(demand):
            return
        else:
            refused.append(demand)
    while (start := _ahead(queue, pool)) is not None:
        yield start


def _ahead(queue: WaitingQueue, pool: WorkerPool) -> tuple[Completion, Route] | None:
    for completion in queue.shortest(MAX_TRIED):
        if (route := pool.choose(completion.demand(), overtakes=True)) is not None:
            return completion, route
    return None


def prefill_request(completion: Completion, route: Route, whole_gpu: bool) -> PrefillRequest:
    """What its prefill worker is sent: what it has put out so far is part of the prompt, what is known is not asked."""
    log = completion.prompt_log
    return PrefillRequest(
        request_id=completion.request_id,
        attempt=completion.attempt,
        token_ids=pack_ids(completion.prompt_ids) + pack_ids(completion.outputs),
        num_outputs=len(completion.outputs),
        sampling=completion.sampling,
        decode_worker_id=route.decode.id,
        decode_epoch=route.decode.epoch,
        whole_gpu=whole_gpu,
        priority=completion.priority,
        turn=completion.turn,
        num_prompt_logprobs=0 if log is None or log.is_complete else log.num_wanted,
        first_scored=0 if log is None else log.num_known,
        salt=completion.salt,
        holder_worker_id=route.holder.id if route.holder else "",
        holder_epoch=route.holder.epoch if route.holder else 0,
        most_tokens=route.most_tokens,
    )
