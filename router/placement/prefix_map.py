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

import numpy as np

from common.memory.base.slot_sizes import block_sizes
from common.wire.messages.memory_reports import BlockEvent
from common.wire.values.block_key import short_keys_in_group
from common.wire.values.fields import MAX_INT32
from common.wire.values.kv_layout import KVLayout
from common.wire.values.resumption import needed, resumable
from router.placement.text_places import Sets, are_in, places_in

MOMENT_S = 1.0
"""Seconds for a report to arrive after the end of its request."""
MAX_REPORTED = 1 << 21
"""Reported blocks of all pools together. Beyond, the reports of the server with the most blocks are dropped."""
MAX_PREDICTED = 1 << 17
"""Predicted blocks of a pool."""
PoolName = tuple[str, int]
"""Id of the pool's owner, and the pool's id or the owner's epoch."""


class Found(NamedTuple):
    """Cached blocks of a text in a pool, from the text's first block on, counted in places of all groups."""

    num_there: int = 0  # the text can be resumed behind them
    num_behind: int = 0  # blocks that would follow after a restore from host memory
    num_parked: int = 0  # blocks of `num_behind` in host memory
    copy_us: int = 0  # to restore a block; 0 if unknown
    num_alike: int = 0  # in append-only groups, so not moved there again; never fewer than `num_there`


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

    def __init__(self, pool: PoolName, num_blocks: int, layout: KVLayout | None = None) -> None:
        self.pool, self.num_blocks, self.layout = pool, num_blocks, layout
        self.is_reported = False  # the memory server reports blocks
        self.reported: set[int] = set()
        self.parked: set[int] = set()  # reported blocks in host memory only
        self.copy_us = 0  # to restore a parked block; 0 if unknown
        self._predictions = Predictions()

    @property
    def is_overfull(self) -> bool:
        """True if more blocks are reported than the pool has."""
        return len(self.reported) > self.num_blocks

    @property
    def num_reported(self) -> int:
        """Reported blocks, in the pool or in host memory."""
        return len(self.reported) + len(self.parked)

    def find(self, keys: Sequence[int], now_s: float, most: int = MAX_INT32) -> Found:
        """Return the cached blocks of a text; of layouts with other than append-only groups, at most `most`."""
        self._predictions.drop_late(now_s)
        if not self._is_plain:
            return self._find_resumable(keys, most)
        num_there = self._num_there(keys, 0)
        end, num_parked = num_there, 0
        while end < len(keys) and keys[end] in self.parked:
            begin, end = end, next((n for n in range(end, len(keys)) if keys[n] not in self.parked), len(keys))
            num_parked += end - begin
            end = self._num_there(keys, end)
        return Found(num_there, end - num_there, num_parked, self.copy_us, num_there)

    def predict(self, keys: Sequence[int], num_places: int = MAX_INT32, *, has_states: bool = False) -> Prediction:
        """Predict that the blocks of a text not reported yet will be in the pool, and return the prediction.

        Args:
            num_places: places behind which the text will be resumable; more than all is all.
            has_states: tells whether there will be snapshots of states, too.
        """
        places = self._expected(keys, min(num_places, len(keys)), has_states=has_states)
        expected = [key for some in places for key in some if key not in self.reported]
        prediction = Prediction(self.pool, expected)
        self._predictions.add(prediction, min(self.num_blocks, MAX_PREDICTED))
        return prediction

    def end(self, prediction: Prediction, now_s: float) -> None:
        """Record the end of a prediction's request; a report must follow soon, or the blocks are not there."""
        prediction.over_s = now_s
        if self.is_reported:
            self._predictions.await_report(prediction)

    def begin(self) -> None:
        """Start to trust the memory server, which next reports all blocks that it has."""
        self._void()
        if not self.is_reported:  # otherwise `find` drops ended predictions soon
            self._predictions.drop_ended()
        self.is_reported = True

    def apply(self, event: BlockEvent, keys: Sequence[int]) -> None:
        """Apply a sealed, parked or evicted event to the blocks with these keys."""
        match event:
            case BlockEvent.SEALED:
                for key in keys if self._predictions.latest else ():
                    self._predictions.settle(key)
                self.reported.update(keys)
                self.parked.difference_update(keys)
            case BlockEvent.PARKED:
                self.reported.difference_update(keys)
                self.parked.update(keys)
            case BlockEvent.GONE:
                self.reported.difference_update(keys)
                self.parked.difference_update(keys)

    def forget_reports(self) -> None:
        """Drop all reports, because the server stopped reporting or a report was lost."""
        self._void()
        self._predictions.keep_ended()
        self.is_reported = False

    def _num_there(self, keys: Sequence[int], begin: int) -> int:
        """Return the end of the run of cached blocks that starts at `begin`."""
        reported, predicted = self.reported, self._predictions.latest
        if reported.issuperset(keys[begin:]):  # the common case of a known text, without a loop in Python
            return len(keys)
        for number in range(begin, len(keys)):
            if keys[number] not in reported and keys[number] not in predicted:
                return number
        return len(keys)

    @property
    def _is_plain(self) -> bool:
        """Tell whether each full block is a single key, so a text can be resumed behind any."""
        return self.layout is None or self.layout.is_plain

    def _expected(self, keys: Sequence[int], num_places: int, *, has_states: bool) -> Iterable[Sequence[int]]:
        """Yield keys of the blocks of a text with these keys, resumable behind `num_places` places."""
        if self.layout is None:
            yield keys
        for number, group in enumerate(self.layout.groups if self.layout else ()):
            of_prefix = needed(group, num_places) if group.grows or has_states else range(0)
            places = range(len(keys)) if group.is_append_only else of_prefix
            yield short_keys_in_group(array("Q", keys[places.start : places.stop]), number)

    def _find_resumable(self, keys: Sequence[int], most: int) -> Found:
        assert self.layout is not None, "the layout is not plain"
        here = (self.reported, self._predictions.latest)
        have = places_in(self.layout, keys, here)
        num_there = resumable(self.layout, [of_group[:most] for of_group in have]).num_places
        num_alike = max(num_there, resumable(self.layout, have).num_alike)
        if not self.parked:
            return Found(num_there, num_alike=num_alike)
        end = resumable(self.layout, places_in(self.layout, keys[:most], (*here, self.parked))).num_places
        if end <= num_there:
            return Found(num_there, num_alike=num_alike)
        num_slots = self._num_slots(keys, end, here)
        copy_us = -(-num_slots * self.copy_us // (end - num_there))
        return Found(num_there, end - num_there, end - num_there, copy_us, num_alike)

    def _num_slots(self, keys: Sequence[int], end: int, here: Sets) -> int:
        """Return the slots of host memory from which a text resumes behind `end` places."""
        assert self.layout is not None, "the layout is not plain"
        num_slots, sizes = 0, block_sizes(self.layout)
        for number, (group, size) in enumerate(zip(self.layout.groups, sizes, strict=True)):
            places = needed(group, end)
            num_slots += size * int(np.count_nonzero(~are_in(keys[places.start : places.stop], number, here)))
        return num_slots

    def _void(self) -> None:
        self.reported.clear()
        self.parked.clear()
        self.copy_us = 0


class PrefixMap:
    """Contents of all pools used by a worker."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._pools: dict[PoolName, PoolContents] = {}
        self._clock = clock

    def add(self, pool: PoolName, num_blocks: int, layout: KVLayout | None = None) -> None:
        """Add a pool used by a worker; the largest number of blocks stated by any worker counts.

        Args:
            layout: of the pool; None for a group of append-only blocks.
        """
        contents = self._pools.setdefault(pool, PoolContents(pool, num_blocks, layout))
        contents.num_blocks = max(contents.num_blocks, num_blocks)

    def keep(self, pools: Collection[PoolName]) -> None:
        """Drop all pools but these."""
        self._pools = {pool: contents for pool, contents in self._pools.items() if pool in pools}

    def forget(self, pool: PoolName) -> None:
        """Forget the blocks of a pool, reported and predicted."""
        if (contents := self._pools.get(pool)) is not None:
            self._pools[pool] = PoolContents(pool, contents.num_blocks, contents.layout)

    def contents(self, pool: PoolName) -> PoolContents:
        """Return the contents of a known pool; raises KeyError for others."""
        return self._pools[pool]

    def is_reported(self, pool: PoolName) -> bool:
        """Tell whether the pool's memory server reports blocks."""
        contents = self._pools.get(pool)
        return contents is not None and contents.is_reported

    def find(self, pool: PoolName, keys: Sequence[int], most: int = MAX_INT32) -> Found:
        """Return the cached blocks of a text in a pool, as far as known (see `PoolContents.find`)."""
        contents = self._pools.get(pool)
        return contents.find(keys, self._clock(), most) if contents is not None else NOTHING

    def predict(
        self, pool: PoolName, keys: Sequence[int], num_places: int = MAX_INT32, *, has_states: bool = False
    ) -> Prediction:
        """Predict the blocks that a request leaves in a pool (see `PoolContents.predict`).

        The caller calls `end` afterwards.
        """
        contents = self._pools.get(pool)
        if contents is None:
            return Prediction(pool, [])
        return contents.predict(keys, num_places, has_states=has_states)

    def end(self, prediction: Prediction) -> None:
        """Record the end of the request of a prediction."""
        if (contents := self._pools.get(prediction.pool)) is not None:
            contents.end(prediction, self._clock())

    @property
    def num_reported(self) -> int:
        """Blocks reported by memory servers."""
        return sum(contents.num_reported for contents in self._pools.values())

    def reported_by(self, server_id: str) -> tuple[int, int] | None:
        """Return blocks reported by a memory server: in its pools, and in host memory only. None without reports."""
        pools = [contents for (owner, _), contents in self._pools.items() if owner == server_id]
        reported = [contents for contents in pools if contents.is_reported]
        return (sum(len(c.reported) for c in reported), sum(len(c.parked) for c in reported)) if reported else None
