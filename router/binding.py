"""Which completion goes to which workers next: late binding, by turn, and what is short ahead of its turn."""

from collections.abc import Iterator

from router.request_state import Completion
from router.waiting_queue import WaitingQueue
from router.worker_pool import LEAST, Demand, Route, WorkerPool

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
