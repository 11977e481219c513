"""What lies where: which pool of KV blocks has which blocks of texts, as far as the router can tell.

A pool's memory server tells of each block that is sealed, or evicted, and whether it stays in host memory (`KVEvents`).
That comes behind its computation, so what a request will leave in a pool is predicted when it is sent: that holds until
it is told of, or until the request has been over for a moment. Where no server tells, predictions are all there is:
each holds until as much else was predicted as the pool has blocks.

Blocks are known by short keys (`text_keys`). One takes about 100 bytes, so eight pools of 50,000 blocks 40 MB, and host
memory of twice as many 80 MB more.
"""

import math
import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from common.wire.messages.memory_reports import BlockEvent

MOMENT_S = 1.0
"""For word of what a request computed to come behind its end."""
MAX_TOLD = 1 << 21
"""Blocks of all pools together: beyond that what the server of most has told is forgotten, whatever servers say."""
MAX_PREDICTED = 1 << 17
"""Blocks of one pool."""
PoolName = tuple[str, int]
"""The id of who owns it, and its own."""


class Found(NamedTuple):
    """Blocks of a text in one pool, from its first on."""

    num_there: int = 0
    num_behind: int = 0  # those that would follow if what is in host memory came back
    num_parked: int = 0  # of these, such blocks
    copy_us: int = 0  # what one takes to come back; 0 where that is not known


NOTHING = Found()


class Prediction:
    """Blocks that a request leaves in a pool."""

    __slots__ = ("keys", "num_latest", "over_s", "pool")

    def __init__(self, pool: PoolName, keys: Iterable[int]) -> None:
        self.pool, self.keys = pool, array("Q", keys)
        self.num_latest = len(
            self.keys
        )  # those that no later request is said to leave there, and no server has told of
        self.over_s = math.inf  # when the request ended


class PoolContents:
    """Of one pool, which has so many blocks."""

    def __init__(self, pool: PoolName, num_blocks: int) -> None:
        self.pool, self.num_blocks = pool, num_blocks
        self.is_told = False  # its memory server says what is there
        self.told: set[int] = set()
        self.parked: set[int] = set()  # what it says to be in host memory only
        self.copy_us = 0  # what copying one of those back takes; 0 where that is not known
        self._predicted: dict[int, Prediction] = {}  # by key, the latest
        self._predictions: OrderedDict[Prediction, None] = OrderedDict()  # those, in their order
        self._over: deque[Prediction] = deque()  # of a pool that is told, in the order of their ends

    @property
    def is_overfull(self) -> bool:
        """Whether its server has told of more blocks than there are."""
        return len(self.told) > self.num_blocks

    @property
    def num_told(self) -> int:
        """Blocks that its server has told of, in the pool or in host memory."""
        return len(self.told) + len(self.parked)

    def find(self, keys: Sequence[int]) -> Found:
        """Blocks of a text."""
        num_there = self._num_there(keys, 0)
        end, num_parked = num_there, 0
        while end < len(keys) and keys[end] in self.parked:
            begin, end = end, next((n for n in range(end, len(keys)) if keys[n] not in self.parked), len(keys))
            num_parked += end - begin
            end = self._num_there(keys, end)
        return Found(num_there, end - num_there, num_parked, self.copy_us)

    def predict(self, keys: Sequence[int]) -> Prediction:
        """Those that are not known to be there will be."""
        prediction = Prediction(self.pool, [key for key in keys if key not in self.told])
        for key in prediction.keys:
            self._settle(key)
            self._predicted[key] = prediction
        if prediction.keys:
            self._predictions[prediction] = None
        while len(self._predicted) > min(self.num_blocks, MAX_PREDICTED):
            self._drop(next(iter(self._predictions)))
        return prediction

    def end(self, prediction: Prediction, now_s: float) -> None:
        """Its request is over: what it has computed is told of soon, if ever."""
        prediction.over_s = now_s
        if self.is_told:
            self._over.append(prediction)

    def begin(self) -> None:
        """From now on its server tells, and begins with what is there."""
        self._void()
        if not self.is_told:  # else those that are over are forgotten in a moment
            for prediction in [prediction for prediction in self._predictions if prediction.over_s < math.inf]:
                self._drop(prediction)
        self.is_told = True

    def note(self, event: BlockEvent, keys: Sequence[int]) -> None:
        """That became of the blocks of these keys."""
        match event:
            case BlockEvent.SEALED:
                for key in keys if self._predicted else ():
                    self._settle(key)
                self.told.update(keys)
                self.parked.difference_update(keys)
            case BlockEvent.PARKED:
                self.told.difference_update(keys)
                self.parked.update(keys)
            case BlockEvent.GONE:
                self.told.difference_update(keys)
                self.parked.difference_update(keys)

    def forget_told(self) -> None:
        """Its server tells no more, or something was missed."""
        self._void()
        self._over.clear()
        self.is_told = False

    def forget_over(self, now_s: float) -> None:
        """What was not told of a moment after its request was over is not there."""
        while self._over and self._over[0].over_s <= now_s - MOMENT_S:
            self._drop(self._over.popleft())

    def _num_there(self, keys: Sequence[int], begin: int) -> int:
        """Where a run of blocks that are there, which begins so, ends."""
        told, predicted = self.told, self._predicted
        for number in range(begin, len(keys)):
            if keys[number] not in told and keys[number] not in predicted:
                return number
        return len(keys)

    def _void(self) -> None:
        self.told.clear()
        self.parked.clear()
        self.copy_us = 0

    def _settle(self, key: int) -> None:
        """It is told of now, or a later request leaves it there."""
        if (prediction := self._predicted.pop(key, None)) is not None:
            prediction.num_latest -= 1
            if not prediction.num_latest:
                self._predictions.pop(prediction, None)

    def _drop(self, prediction: Prediction) -> None:
        self._predictions.pop(prediction, None)
        for key in prediction.keys:
            if self._predicted.get(key) is prediction:
                del self._predicted[key]


class PrefixMap:
    """Of all pools that some worker has blocks of."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._pools: dict[PoolName, PoolContents] = {}
        self._clock = clock

    def meet(self, pool: PoolName, num_blocks: int) -> None:
        """A worker has blocks of it; that there are fewer than another one said is not believed."""
        contents = self._pools.setdefault(pool, PoolContents(pool, num_blocks))
        contents.num_blocks = max(contents.num_blocks, num_blocks)

    def keep(self, pools: Collection[PoolName]) -> None:
        """All others are gone."""
        self._pools = {pool: contents for pool, contents in self._pools.items() if pool in pools}

    def forget(self, pool: PoolName) -> None:
        """Nobody knows what is there."""
        if (contents := self._pools.get(pool)) is not None:
            self._pools[pool] = PoolContents(pool, contents.num_blocks)

    def contents(self, pool: PoolName) -> PoolContents:
        """What is known of one that some worker has blocks of."""
        return self._pools[pool]

    def is_told(self, pool: PoolName) -> bool:
        """Whether its memory server says what is there."""
        contents = self._pools.get(pool)
        return contents is not None and contents.is_told

    def find(self, pool: PoolName, keys: Sequence[int]) -> Found:
        """Blocks of a text, as far as can be told."""
        if (contents := self._pools.get(pool)) is None:
            return NOTHING
        contents.forget_over(self._clock())
        return contents.find(keys)

    def predict(self, pool: PoolName, keys: Sequence[int]) -> Prediction:
        """A request leaves these blocks there; its `end` is to follow."""
        contents = self._pools.get(pool)
        return contents.predict(keys) if contents is not None else Prediction(pool, [])

    def end(self, prediction: Prediction) -> None:
        """The request is over."""
        if (contents := self._pools.get(prediction.pool)) is not None:
            contents.end(prediction, self._clock())

    @property
    def num_told(self) -> int:
        """Blocks that memory servers have told of."""
        return sum(contents.num_told for contents in self._pools.values())

    def told_by(self, server_id: str) -> tuple[int, int] | None:
        """What one has told of: in its pools, and in host memory only; None if it tells of none of its pools."""
        told = [contents for (owner, _), contents in self._pools.items() if owner == server_id and contents.is_told]
        return (sum(len(c.told) for c in told), sum(len(c.parked) for c in told)) if told else None
