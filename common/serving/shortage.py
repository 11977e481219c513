"""Blocks that are short: those that wait for some keep what was found of them for a while, and no longer.

All might wait for one another otherwise.
"""

import math
from collections.abc import Callable

PATIENCE_S = 1.0
"""How long those that wait keep from others what was found of them."""


class Shortage:
    """Of one pool, as who takes blocks from it sees it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since_s = math.inf

    def lasts(self) -> bool:
        """There are too few for somebody, again; whether it has been so for long."""
        now_s = self._clock()
        self._since_s = min(self._since_s, now_s)
        return now_s - self._since_s > PATIENCE_S

    def ends(self) -> None:
        """Somebody has all that it wanted."""
        self._since_s = math.inf
