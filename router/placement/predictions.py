"""Blocks that requests will leave in a pool, as long as the pool's memory server has not reported them."""

import math
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable

MOMENT_S = 1.0
"""Seconds for a report to arrive after the end of its request."""
PoolName = tuple[str, int]
"""Id of the pool's owner, and the pool's id or the owner's epoch."""


class Prediction:
    """Blocks expected in a pool after a request."""

    __slots__ = ("keys", "num_latest", "over_s", "pool")

    def __init__(self, pool: PoolName, keys: Iterable[int]) -> None:
        self.pool, self.keys = pool, array("Q", keys)
        self.num_latest = len(self.keys)  # keys neither reported yet nor in a later prediction
        self.over_s = math.inf  # when the request ended


class Predictions:
    """Predicted blocks of a pool, each in its latest prediction.

    Args:
        on_drop: called when blocks are not expected any more.
    """

    def __init__(self, on_drop: Callable[[], None]) -> None:
        self._on_drop = on_drop
        self.latest: dict[int, Prediction] = {}  # by key
        self._all: OrderedDict[Prediction, None] = OrderedDict()  # oldest first
        self._over: deque[Prediction] = deque()  # of ended requests, oldest first; their blocks must be reported soon

    def add(self, prediction: Prediction, most_blocks: int) -> None:
        """Add a prediction; the oldest give way when more than `most_blocks` are predicted."""
        for key in prediction.keys:
            self.settle(key)
            self.latest[key] = prediction
        if prediction.keys:
            self._all[prediction] = None
        while len(self.latest) > most_blocks:
            self._drop(next(iter(self._all)))

    def settle(self, key: int) -> None:
        """Take a key out of its prediction, because of a report or a later prediction."""
        if (prediction := self.latest.pop(key, None)) is not None:
            prediction.num_latest -= 1
            if not prediction.num_latest:
                self._all.pop(prediction, None)

    def await_report(self, prediction: Prediction) -> None:
        """Drop an ended request's prediction `MOMENT_S` after its end."""
        self._over.append(prediction)

    def drop_late(self, now_s: float) -> None:
        """Drop predictions not confirmed within `MOMENT_S` after the end of their requests."""
        while self._over and self._over[0].over_s <= now_s - MOMENT_S:
            self._drop(self._over.popleft())

    def drop_ended(self) -> None:
        """Drop the predictions of all ended requests."""
        for prediction in [prediction for prediction in self._all if prediction.over_s < math.inf]:
            self._drop(prediction)

    def keep_ended(self) -> None:
        """Keep predictions of ended requests until newer predictions fill the pool, because no reports come."""
        self._over.clear()

    def _drop(self, prediction: Prediction) -> None:
        self._all.pop(prediction, None)
        if dropped := [key for key in prediction.keys if self.latest.get(key) is prediction]:
            for key in dropped:
                del self.latest[key]
            self._on_drop()
