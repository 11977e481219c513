"""Blocks wanted from a memory server, and surplus to give back. Counts are by group.

A sequence without enough blocks says how many are lacking. The smallest lack is served first, so a growing sequence
never waits for a new prompt.
"""

import time
from collections.abc import Callable
from functools import partial

from common.wire.values.kv_layout import Counts
from common.wire.values.pool_shape import PoolShape, are_enough, minus

LACKING_S = 1.0
"""Lifetime of a lack that is not repeated."""
PATIENCE_S = 0.1
"""Wait for blocks from others, before a sequence is dropped."""


class Demand:
    """Demand of a worker for blocks, as known here and as told to the server."""

    def __init__(self, shape: PoolShape, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._most, self._nothing, self._clock = shape.assured, shape.layout.nothing, clock
        self._lacking, self._lacking_s = self._nothing, 0.0  # smallest lack, and its time
        self._is_fresh = False  # a lack was told since the last `decide`; older lacks are outdated
        self._wanted, self._wanted_s = self._nothing, 0.0  # as told to the server, and since when
        self.is_short = False  # a worker waits for blocks of the pool

    @property
    def is_in_vain(self) -> bool:
        """Tell whether others have had `PATIENCE_S` to give wanted blocks back."""
        return self.is_short and any(self._wanted) and self._clock() - self._wanted_s > PATIENCE_S

    @property
    def is_lacking(self) -> bool:
        """Tell whether blocks are lacking, so blocks at hand may have come for them."""
        return self.is_short or any(self._lacking)

    def lack(self, counts: Counts) -> None:
        """Take the number of lacking blocks, unless a smaller lack is known."""
        if not self._is_fresh or sum(counts) <= sum(self._lacking):
            self._lacking, self._lacking_s, self._is_fresh = counts, self._clock(), True

    def use(self, counts: Counts) -> None:
        """Forget the lack if so many blocks end the lack."""
        if are_enough(counts, self._lacking):
            self._lacking = self._nothing

    def answered(self) -> None:
        """Forget the last want, because the server has answered."""
        self._wanted = self._nothing

    def shortage(self, *, is_short: bool) -> None:
        """Record whether a worker waits for blocks of the pool."""
        self.is_short, self._wanted_s = is_short, self._clock()

    def decide(self, at_hand: Counts, level: Counts, floor: Counts, *, is_busy: bool) -> tuple[Counts | None, Counts]:
        """Return blocks to ask for, None for no message, and surplus to give back after that.

        `LeaseCache.update` has the arguments.
        """
        now_s = self._clock()
        if is_busy:
            self._lacking_s = now_s
        elif now_s - self._lacking_s > LACKING_S:
            self._lacking = self._nothing
        self._is_fresh = False
        is_complete = are_enough(at_hand, self._lacking)  # lacking blocks wait to be used
        levels = zip(at_hand, self._lacking, level, floor, self._most, strict=True)
        choose = partial(_short_of, is_complete=is_complete) if self.is_short else _usual
        wanted, surplus = zip(*(choose(*of_group) for of_group in levels), strict=True)
        return (wanted if self._must_send(wanted, now_s) else None), surplus

    def _must_send(self, wanted: Counts, now_s: float) -> bool:
        """Tell whether to send a want, which grew, or shrank while others wait; records the want if so."""
        is_more = any(minus(wanted, self._wanted))
        if not is_more and (wanted == self._wanted or not (self.is_short or not any(wanted))):
            return False
        self._wanted_s = self._wanted_s if any(self._wanted) else now_s
        self._wanted = wanted
        return True


def _usual(at_hand: int, lacking: int, level: int, floor: int, most: int) -> tuple[int, int]:
    """Return blocks of a group to want and to give back, without a shortage."""
    wanted = max(2 * level, lacking) - at_hand if at_hand < max(level, lacking) else 0
    surplus = at_hand - max(2 * level, lacking) if at_hand > max(3 * level, lacking) else 0
    return min(max(wanted, 0), most), surplus


def _short_of(at_hand: int, lacking: int, level: int, floor: int, most: int, *, is_complete: bool) -> tuple[int, int]:
    """Return blocks of a group to want and to give back, during a shortage."""
    keep = lacking if is_complete and lacking > floor else floor
    wanted = max(lacking, floor) - min(at_hand, keep)
    return min(max(wanted, 0), most), max(0, at_hand - keep)
