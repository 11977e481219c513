"""Map of cached prefixes: the blocks in each KV pool, as far as the router knows.

A pool's memory server reports every block sealed or evicted, and whether an evicted block stays in host memory
(`KVEvents`). Such reports come after the computation, so the router predicts the blocks of a request when sending it. A
prediction holds until the server reports the block, or until a moment after the end of the request. Without reports
from a server, a prediction holds until newer predictions would fill the pool.

Short keys identify blocks (`text_keys`). An entry takes about 100 bytes. Eight pools of 50,000 blocks take 40 MB, and
twice as many blocks in host memory take another 80 MB.
"""

import time
from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from common.memory.base.slot_sizes import block_sizes
from common.wire.messages.memory_reports import BlockEvent
from common.wire.values.block_key import short_keys_in_group
from common.wire.values.fields import MAX_INT32
from common.wire.values.kv_layout import KVLayout
from common.wire.values.resumption import needed, resumable
from router.placement.predictions import MOMENT_S, PoolName, Prediction, Predictions
from router.placement.text_keys import TextKeys
from router.placement.text_places import Sets, are_in, places_in

MAX_REPORTED = 1 << 21
"""Reported blocks of all pools together. Beyond, the reports of the server with the most blocks are dropped."""
MAX_PREDICTED = 1 << 17
"""Predicted blocks of a pool."""
MAX_RUNS = 64
"""Beginnings of texts remembered for a pool."""


class Found(NamedTuple):
    """Cached blocks of a text in a pool, from the text's first block on, counted in places of all groups."""

    num_there: int = 0  # the text can be resumed behind them
    num_behind: int = 0  # blocks that would follow after a restore from host memory
    num_parked: int = 0  # blocks of `num_behind` in host memory
    copy_us: int = 0  # to restore a block; 0 if unknown
    num_alike: int = 0  # in append-only groups, so not moved there again; never fewer than `num_there`


NOTHING = Found()


class PoolContents:
    """Known and predicted blocks of a pool."""

    def __init__(self, pool: PoolName, num_blocks: int, layout: KVLayout | None = None) -> None:
        self.pool, self.num_blocks, self.layout = pool, num_blocks, layout
        self.is_plain = layout is None or layout.is_plain  # each full block is a single key
        self.is_reported = False  # the memory server reports blocks
        self.reported: set[int] = set()
        self.parked: set[int] = set()  # reported blocks in host memory only
        self.copy_us = 0  # to restore a parked block; 0 if unknown
        self.runs: dict[int, bytes] = {}  # by first key: keys of beginnings of texts, all of whose blocks are there
        self._predictions = Predictions(self.runs.clear)
        self.predicted = self._predictions.latest

    @property
    def is_overfull(self) -> bool:
        """True if more blocks are reported than the pool has."""
        return len(self.reported) > self.num_blocks

    @property
    def num_reported(self) -> int:
        """Reported blocks, in the pool or in host memory."""
        return len(self.reported) + len(self.parked)

    def find(self, keys: Sequence[int], now_s: float, most: int = MAX_INT32, num_known: int = 0) -> Found:
        """Return the cached blocks of a text; of layouts with other than append-only groups, at most `most`.

        Args:
            num_known: first blocks known to be there.
        """
        self._predictions.drop_late(now_s)
        if not self.is_plain:
            return self._find_resumable(keys, most)
        num_there = self._num_there(keys, num_known)
        end, num_parked = num_there, 0
        while end < len(keys) and keys[end] in self.parked:
            begin, end = end, next((n for n in range(end, len(keys)) if keys[n] not in self.parked), len(keys))
            num_parked += end - begin
            end = self._num_there(keys, end)
        return Found(num_there, end - num_there, num_parked, self.copy_us if num_parked else 0, num_there)

    def remember(self, first: int, run: bytes) -> None:
        """Remember the keys of a text's beginning, which other pools have as well, until a block goes."""
        if len(self.runs) >= MAX_RUNS:
            self.runs.clear()
        self.runs[first] = run

    def drop_late(self, now_s: float) -> None:
        self._predictions.drop_late(now_s)

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
                for key in keys if self.predicted else ():
                    self._predictions.settle(key)
                self.reported.update(keys)
                self.parked.difference_update(keys)
            case BlockEvent.PARKED:
                self.runs.clear()
                self.reported.difference_update(keys)
                self.parked.update(keys)
            case BlockEvent.GONE:
                self.runs.clear()
                self.reported.difference_update(keys)
                self.parked.difference_update(keys)

    def forget_reports(self) -> None:
        """Drop all reports, because the server stopped reporting or a report was lost."""
        self._void()
        self._predictions.keep_ended()
        self.is_reported = False

    def _num_there(self, keys: Sequence[int], begin: int) -> int:
        """Return the end of the run of cached blocks that starts at `begin`."""
        reported, predicted = self.reported, self.predicted
        if reported.issuperset(keys[begin:]):  # the common case of a known text, without a loop in Python
            return len(keys)
        for number in range(begin, len(keys)):
            if keys[number] not in reported and keys[number] not in predicted:
                return number
        return len(keys)

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
        here = (self.reported, self.predicted)
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
        self.runs.clear()
        self.reported.clear()
        self.parked.clear()
        self.copy_us = 0


class PrefixMap:
    """Contents of all pools used by a worker."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._pools: dict[PoolName, PoolContents] = {}
        self._layouts: dict[KVLayout, KVLayout] = {}  # each is there once
        self._ended = deque[Prediction]()  # whose pools may have late ones, the first first
        self._clock = clock

    def add(self, pool: PoolName, num_blocks: int, layout: KVLayout | None = None) -> None:
        """Add a pool used by a worker; the largest number of blocks stated by any worker counts.

        Args:
            layout: of the pool; None for a group of append-only blocks.
        """
        layout = layout and self.shared(layout)
        contents = self._pools.setdefault(pool, PoolContents(pool, num_blocks, layout))
        contents.num_blocks = max(contents.num_blocks, num_blocks)

    def shared(self, layout: KVLayout) -> KVLayout:
        """Return the same object for each equal layout."""
        return self._layouts.setdefault(layout, layout)

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

    def holding(self, text: TextKeys, num_tokens: int) -> dict[Found, list[PoolName]]:
        """Return the pools that have blocks of a prompt of `num_tokens` tokens, by what they have.

        Many pools may have the beginning of many prompts. Each remembers such beginnings while no block goes, and only
        the place behind is looked at.
        """
        found: defaultdict[Found, list[PoolName]] = defaultdict(list)
        if not text.keys or (layout := self._layouts.get(text.layout)) is None:
            return found
        self._drop_late()
        keys, packed, now_s, most = text.keys, text.keys.tobytes(), self._clock(), (num_tokens - 1) // text.block_size
        by_run: defaultdict[bytes, list[PoolContents]] = defaultdict(list)
        first, size = keys[0], keys.itemsize
        for contents in self._with_beginning(keys[:1], layout):
            by_run[contents.runs.get(first, b"")].append(contents)
        runs: dict[int, bytes] = {}  # beginnings of this text, by length
        for run, pools in by_run.items():
            known = len(run) // size if packed.startswith(run) else 0
            further = set(pools)
            if known:
                runs[known], further = run, set(_having(pools, keys[known]) if known < len(keys) else ())
                found[Found(known, num_alike=known)] += [each.pool for each in pools if each not in further]
            for contents in further:
                here = contents.find(keys, now_s, most, known)
                found[here].append(contents.pool)
                if contents.is_plain and (num_there := here.num_there) > known:
                    if num_there in runs:
                        contents.remember(first, runs[num_there])
                    runs.setdefault(num_there, packed[: num_there * size])
        return found

    def _with_beginning(self, first: "array[int]", layout: KVLayout) -> Collection[PoolContents]:
        """Return the pools of a layout that may have blocks of a text with this first key."""
        pools, number = [contents for contents in self._pools.values() if contents.layout is layout], layout.main
        if not layout.groups[number].is_append_only:
            return pools
        return _having(pools, *(short_keys_in_group(first, number) if number else first))

    def _drop_late(self) -> None:
        now_s = self._clock()
        while self._ended and self._ended[0].over_s <= now_s - MOMENT_S:
            if (contents := self._pools.get(self._ended.popleft().pool)) is not None:
                contents.drop_late(now_s)

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
            self._ended.append(prediction)

    @property
    def num_reported(self) -> int:
        """Blocks reported by memory servers."""
        return sum(contents.num_reported for contents in self._pools.values())

    def reported_by(self, server_id: str) -> tuple[int, int] | None:
        """Return blocks reported by a memory server: in its pools, and in host memory only. None without reports."""
        pools = [contents for (owner, _), contents in self._pools.items() if owner == server_id]
        reported = [contents for contents in pools if contents.is_reported]
        return (sum(len(c.reported) for c in reported), sum(len(c.parked) for c in reported)) if reported else None


def _having(pools: Iterable[PoolContents], key: int) -> list[PoolContents]:
    """Return the pools in which a block is there, expected or in host memory."""
    return [each for each in pools if key in each.reported or key in each.predicted or key in each.parked]
