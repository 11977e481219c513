"""Detection of a deadlock between prompts that wait for KV blocks, to give a handoff back.

Two GPUs with workers of both roles may each be full of prompts offered to the other's decode worker. Each decode worker
then needs blocks that only the other's progress frees. Or prompts fill a pool and wait for its decode worker, whose
first sequence lacks a block for the next token. A wait for a neighbour's long prompt is no standstill, because the
prompt's blocks are sealed chunk by chunk.
"""

import math
import random
import time
from collections.abc import Callable

LEAST_S = 2.0
"""Longer than a prompt chunk and its report. Blocks given back can be found again."""


class Standstill:
    """Detector of long standstills; random durations let the first of two workers give way alone.

    Args:
        chance: returns a number from 0 to 1.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, chance: Callable[[], float] = random.random
    ) -> None:
        self._clock, self._chance = clock, chance
        self._end_s, self._num_done = math.inf, 0

    def is_over(self, *, is_still: bool, num_done: int) -> bool:
        """Tell whether the standstill has lasted long enough; restarts afterwards, and on any movement.

        Args:
            is_still: nothing moves here.
            num_done: count of the progress of others in the pool.
        """
        now_s, is_still = self._clock(), is_still and num_done == self._num_done
        self._num_done = num_done
        if is_still and now_s < self._end_s < math.inf:
            return False
        had_enough = is_still and self._end_s < math.inf
        self._end_s = now_s + LEAST_S * (1 + self._chance()) if is_still else math.inf
        return had_enough
