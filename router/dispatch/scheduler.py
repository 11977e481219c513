"""Late binding of completions to workers: by turn, and short prompts ahead of turn.

With several pools of KV blocks, the pools holding the first completion's prefix may be busy. Other completions then
pass, if their prefix is in a pool with room. So no prefix is computed twice for want of a place. A completion is passed
by at most MOST_PASSING_TOKENS computed tokens.
"""

from collections.abc import Callable, Iterator
from itertools import islice

from router.dispatch.completion.state import Completion
from router.dispatch.waiting_queue import AnyWaiting, WaitingQueue
from router.placement.choice import awaits_trial, choose, may_overtake
from router.placement.route import LEAST, Demand, Route
from router.placement.worker_pool import WorkerPool

MAX_TRIED = 8
"""Short prompts tried ahead of turn when the shortest finds no worker."""
MAX_LOOKED_AT, MOST_LOOKED_AT = 16, 32_768
"""Prompts, and tokens of prompts, searched for a passing completion: the search delays all streams."""
WASTED_TOKENS = 512
"""Tokens computed again, above which others may pass; also the least prefix of a passing completion."""
MOST_PASSING_TOKENS = 32_768
"""Computed tokens of all completions passing a prompt: four full steps."""
MAX_AT_ONCE = 32
"""Completions started or aborted in a turn of the event loop: 2048 would delay streams by 0.3 s."""

Defer = Callable[[Callable[[], None]], object]
"""Schedules a call after all other tasks had a turn."""
Start = Callable[[Completion, Route], None]
"""Sends a queued completion to the workers of a route."""


class Scheduler:
    """Starts queued completions, a limited number in each turn of the event loop."""

    def __init__(self, queue: WaitingQueue[Completion], pool: WorkerPool, start: Start, defer: Defer) -> None:
        self.defer = defer
        self._queue, self._pool, self._start = queue, pool, start
        self._is_scheduled = False

    def schedule(self) -> None:
        """Start queued completions once per turn of the event loop, because a start may look at many."""
        if not self._is_scheduled and len(self._queue):
            self._is_scheduled = True
            self.defer(self._start_some)

    def _start_some(self) -> None:
        """Start completions while some pair of workers has room, at most MAX_AT_ONCE."""
        self._is_scheduled = False
        num_left = MAX_AT_ONCE
        for completion, route in islice(starts(self._queue, self._pool), MAX_AT_ONCE):
            self._start(completion, route)
            num_left -= 1
        if num_left == 0:
            self.schedule()


def starts(queue: WaitingQueue[AnyWaiting], pool: WorkerPool) -> Iterator[tuple[AnyWaiting, Route]]:
    """Yield completions for pairs of workers with room.

    The caller takes each completion from the queue and assigns the route before asking for the next.

    Others may go ahead of a completion too long for every pair with room. Others also pass a completion whose prefix
    would be computed again (see `_passing`). A trial holds back every start until some pair has no unproven attempt.
    During a trial, only completions needing the tried pair wait.
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


def _passing(
    first: AnyWaiting, route: Route, queue: WaitingQueue[AnyWaiting], pool: WorkerPool
) -> tuple[AnyWaiting, Route] | None:
    """Return a completion of equal priority to pass `first`, and a route where no cached prefix goes to waste.

    Return None if `first` itself finds enough of the prefix on `route`, or has let enough tokens pass.
    """
    is_patient = first.num_passing < MOST_PASSING_TOKENS and not first.is_suspect
    if not is_patient or route.num_wasted <= WASTED_TOKENS:
        return None
    num_left = MOST_LOOKED_AT
    for completion in islice(queue.by_turn(), MAX_LOOKED_AT):
        if completion is first or completion.spec.priority != first.spec.priority:
            continue
        other = choose(pool, completion.demand())
        if other is not None and other.cost.num_expected > WASTED_TOKENS and not other.num_wasted:
            return completion, other
        num_left -= completion.num_tokens
        if num_left <= 0:
            break
    return None


def _ahead(queue: WaitingQueue[AnyWaiting], pool: WorkerPool) -> tuple[AnyWaiting, Route] | None:
    shortest = queue.shortest(MAX_TRIED)
    if not shortest or not may_overtake(pool, shortest[0].demand()):
        return None
    for completion in shortest:
        if (route := choose(pool, completion.demand(), overtakes=True)) is not None:
            return completion, route
    return None
