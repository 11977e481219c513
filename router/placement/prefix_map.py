"""Map of cached prefixes: the blocks in each KV pool, as far as the router knows.

A pool's memory server reports every block sealed or evicted, and whether an evicted block stays in host memory
(`KVEvents`). Such reports come after the computation, so the router predicts the blocks of a request when sending it. A
prediction holds until the server reports the block, or until a moment after the end of the request. Without reports
from a server, a prediction holds until newer predictions would fill the pool.

Short keys identify blocks (`text_keys`). An entry takes about 100 bytes. Eight pools of 50,000 blocks take 40 MB, and
twice as many blocks in host memory take another 80 MB.
"""

import math
import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from common.wire.messages.memory_reports import BlockEvent

MOMENT_S = 1.0
"""Seconds for a report to arrive after the end of its request."""
MAX_TOLD = 1 << 21
"""Reported blocks of all pools together. Beyond, the reports of the server with the most blocks are dropped."""
MAX_PREDICTED = 1 << 17
"""Predicted blocks of a pool."""
PoolName = tuple[str, int]
"""Id of the pool's owner, and the pool's id or the owner's epoch."""


class Found(NamedTuple):
    """Cached blocks of a text in a pool, from the text's first block on."""

    num_there: int = 0
    num_behind: int = 0  # blocks that would follow after a restore from host memory
    num_parked: int = 0  # blocks of `num_behind` in host memory
    copy_us: int = 0  # to restore a block; 0 if unknown


NOTHING = Found()


class Prediction:
    """Blocks expected in a pool after a request."""

    __slots__ = ("keys", "num_latest", "over_s", "pool")

    def __init__(self, pool: PoolName, keys: Iterable[int]) -> None:
        self.pool, self.keys = pool, array("Q", keys)
        self.num_latest = len(self.keys)  # keys neither reported yet nor in a later prediction
        self.over_s = math.inf  # when the request ended


class Predictions:
    """Predicted blocks of a pool, each in its latest prediction."""

    def __init__(self) -> None:
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
        for key in prediction.keys:
            if self.latest.get(key) is prediction:
                del self.latest[key]


class PoolContents:
    """Known and predicted blocks of a pool."""

    def __init__(self, pool: PoolName, num_blocks: int) -> None:
        self.pool, self.num_blocks = pool, num_blocks
        self.is_told = False  # the memory server reports blocks
        self.told: set[int] = set()
        self.parked: set[int] = set()  # reported blocks in host memory only
        self.copy_us = 0  # to restore a parked block; 0 if unknown
        self._predictions = Predictions()

    @property
    def is_overfull(self) -> bool:
        """True if more blocks are reported than the pool has."""
        return len(self.told) > self.num_blocks

    @property
    def num_told(self) -> int:
        """Reported blocks, in the pool or in host memory."""
        return len(self.told) + len(self.parked)

    def find(self, keys: Sequence[int], now_s: float) -> Found:
        """Return the cached blocks of a text."""
        self._predictions.drop_late(now_s)
        num_there = self._num_there(keys, 0)
        end, num_parked = num_there, 0
        while end < len(keys) and keys[end] in self.parked:
            begin, end = end, next((n for n in range(end, len(keys)) if keys[n] not in self.parked), len(keys))
            num_parked += end - begin
            end = self._num_there(keys, end)
        return Found(num_there, end - num_there, num_parked, self.copy_us)

    def predict(self, keys: Sequence[int]) -> Prediction:
        """Predict that all blocks not reported yet will be in the pool, and return the prediction."""
        prediction = Prediction(self.pool, [key for key in keys if key not in self.told])
        self._predictions.add(prediction, min(self.num_blocks, MAX_PREDICTED))
        return prediction

    def end(self, prediction: Prediction, now_s: float) -> None:
        """Note the end of a prediction's request; a report must follow soon, or the blocks are not there."""
        prediction.over_s = now_s
        if self.is_told:
            self._predictions.await_report(prediction)

    def begin(self) -> None:
        """Start to trust the memory server, which next reports all blocks that it has."""
        self._void()
        if not self.is_told:  # otherwise `find` drops ended predictions soon
            self._predictions.drop_ended()
        self.is_told = True

    def note(self, event: BlockEvent, keys: Sequence[int]) -> None:
        """Apply a sealed, parked or evicted event to the blocks with these keys."""
        match event:
            case BlockEvent.SEALED:
                for key in keys if self._predictions.latest else ():
                    self._predictions.settle(key)
                self.told.update(keys)
                self.parked.difference_update(keys)
            case BlockEvent.PARKED:
                self.told.difference_update(keys)
                self.parked.update(keys)
            case BlockEvent.GONE:
                self.told.difference_update(keys)
                self.parked.difference_update(keys)

    def forget_told(self) -> None:
        """Drop all reports, because the server stopped reporting or a report was lost."""
        self._void()
        self._predictions.keep_ended()
        self.is_told = False

    def _num_there(self, keys: Sequence[int], begin: int) -> int:
        """Return the end of the run of cached blocks that starts at `begin`."""
        told, predicted = self.told, self._predictions.latest
        if told.issuperset(keys[begin:]):  # the common case of a known text, without a loop in Python
            return len(keys)
        for number in range(begin, len(keys)):
            if keys[number] not in told and keys[number] not in predicted:
                return number
        return len(keys)

    def _void(self) -> None:
        self.told.clear()
        self.parked.clear()
        self.copy_us = 0


class PrefixMap:
    """Contents of all pools used by a worker."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._pools: dict[PoolName, PoolContents] = {}
        self._clock = clock

    def add(self, pool: PoolName, num_blocks: int) -> None:
        """Add a pool used by a worker; the largest number of blocks stated by any worker counts."""
        contents = self._pools.setdefault(pool, PoolContents(pool, num_blocks))
        contents.num_blocks = max(contents.num_blocks, num_blocks)

    def keep(self, pools: Collection[PoolName]) -> None:
        """Drop all pools but these."""
        self._pools = {pool: contents for pool, contents in self._pools.items() if pool in pools}

    def forget(self, pool: PoolName) -> None:
        """Forget the blocks of a pool, reported and predicted."""
        if (contents := self._pools.get(pool)) is not None:
            self._pools[pool] = PoolContents(pool, contents.num_blocks)

    def contents(self, pool: PoolName) -> PoolContents:
        """Return the contents of a known pool; raises KeyError for others."""
        return self._pools[pool]

    def is_told(self, pool: PoolName) -> bool:
        """Tell whether the pool's memory server reports blocks."""
        contents = self._pools.get(pool)
        return contents is not None and contents.is_told

    def find(self, pool: PoolName, keys: Sequence[int]) -> Found:
        """Return the cached blocks of a text in a pool, as far as known."""
        contents = self._pools.get(pool)
        return contents.find(keys, self._clock()) if contents is not None else NOTHING

    def predict(self, pool: PoolName, keys: Sequence[int]) -> Prediction:
        """Predict the blocks that a request leaves in a pool; the caller calls `end` afterwards."""
        contents = self._pools.get(pool)
        return contents.predict(keys) if contents is not None else Prediction(pool, [])

    def end(self, prediction: Prediction) -> None:
        """Note the end of the request of a prediction."""
        if (contents := self._pools.get(prediction.pool)) is not None:
            contents.end(prediction, self._clock())

    @property
    def num_told(self) -> int:
        """Blocks reported by memory servers."""
        return sum(contents.num_told for contents in self._pools.values())

    def told_by(self, server_id: str) -> tuple[int, int] | None:
        """Return blocks reported by a memory server: in its pools, and in host memory only. None without reports."""
        told = [contents for (owner, _), contents in self._pools.items() if owner == server_id and contents.is_told]
        return (sum(len(c.told) for c in told), sum(len(c.parked) for c in told)) if told else None
