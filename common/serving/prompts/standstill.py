"""When a handoff is given back that no blocks come free for.

Two GPUs with workers of both kinds may each be full of prompts that are offered to the other's decode worker: what each
lacks is in the pool of the other, and comes free only when that one has what it lacks. Or prompts that fill a pool wait
for who decodes there, and the first of them lacks a block for its next token. Who merely waits for a
neighbour's long prompt sees that one get on: its blocks are sealed, chunk by chunk.
"""

import math
import random
import time
from collections.abc import Callable

LEAST_S = 2.0
"""Longer than a chunk of a prompt takes, and word of it; what is given back is found again, if its blocks are."""


class Standstill:
    """Says when nothing has moved for long: each time after another while, so that of two one goes first.

    Args:
        chance: from 0 to 1.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, chance: Callable[[], float] = random.random
    ) -> None:
        self._clock, self._chance = clock, chance
        self._end_s, self._num_done = math.inf, 0

    def is_over(self, *, is_still: bool, num_done: int) -> bool:
        """Whether it has lasted long enough; it begins anew when it has, or when something moves.

        Args:
            is_still: nothing moves here.
            num_done: counts what others do in the pool.
        """
        now_s, is_still = self._clock(), is_still and num_done == self._num_done
        self._num_done = num_done
        if is_still and now_s < self._end_s < math.inf:
            return False
        had_enough = is_still and self._end_s < math.inf
        self._end_s = now_s + LEAST_S * (1 + self._chance()) if is_still else math.inf
        return had_enough
