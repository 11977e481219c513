"""What becomes of blocks that can be found by a key, for who keeps account of them elsewhere.

Nothing is kept until somebody asks. Then he is told of all that are there, block id by block id and some at a time, and
in between of what happens meanwhile. What is told of a block twice is told in order, so that the last word counts: he
knows how things are once all ids have had their turn.

Blocks come and go by the thousand while all workers wait, so what happens is noted as it is named, in arrays, and put
together when it is sent.
"""

from collections import deque
from collections.abc import Callable
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from common.wire.fields import KEY_BYTES, MAX_EVENT_KEYS, SHORT_KEY_BYTES
from common.wire.packing import pack_ids

SHORT_KEY = np.dtype(f"V{SHORT_KEY_BYTES}")
KeysBetween = Callable[[int, int], np.ndarray]
"""Of blocks with ids from one number to another, those that can be found: [num_found] keys."""


class Told(NamedTuple):
    """What is to be told next, as `KVEvents` has it."""

    sequence: int
    runs: bytes
    keys: bytes


class EventLog:
    """Of one pool, whose blocks have ids below `num_ids`."""

    def __init__(self, num_ids: int, keys_between: KeysBetween) -> None:
        self.is_on = False
        self._num_ids, self._keys_between = num_ids, keys_between
        self._sequence = 0
        self._num_walked = num_ids  # blocks of ids below that have been told of
        self._runs: deque[tuple[bool, np.ndarray]] = deque()  # sealed or evicted: [num_keys] keys
        self._num_pending = 0  # keys in those

    @property
    def has_news(self) -> bool:
        return self.is_on and bool(self._num_pending or self._num_walked < self._num_ids)

    def begin(self) -> None:
        """Tell of everything."""
        self.is_on, self._sequence, self._num_walked = True, 0, 0
        self._forget()

    def void(self) -> None:
        """Nothing is to be found there any more, whatever happens."""
        self._num_ids = 0
        if self.is_on:
            self.begin()

    def stop(self) -> None:
        """Nobody listens."""
        self.is_on = False
        self._forget()

    def sealed(self, keys: np.ndarray) -> None:
        """Blocks can be found by these: [num_blocks] keys."""
        self._note(True, keys)

    def evicted(self, keys: np.ndarray) -> None:
        """Blocks can be found by these no more: [num_blocks] keys."""
        self._note(False, keys)

    def take(self) -> Told:
        """What is to be told next, which may be nothing; it is taken to be told then."""
        runs, room = [], MAX_EVENT_KEYS
        while room and self._runs:
            are_sealed, keys = self._runs.popleft()
            if len(keys) > room:
                self._runs.appendleft((are_sealed, keys[room:]))
                keys = keys[:room]
            runs.append((are_sealed, keys))
            room -= len(keys)
            self._num_pending -= len(keys)
        if room and self._num_walked < self._num_ids:
            end = min(self._num_walked + room, self._num_ids)
            runs.append((True, self._keys_between(self._num_walked, end)))
            self._num_walked = end
        sequence, self._sequence = self._sequence, self._sequence + 1
        return Told(sequence, *_packed(runs))

    def _note(self, are_sealed: bool, keys: np.ndarray) -> None:
        if not self.is_on or not self._num_ids:
            return
        self._runs.append((are_sealed, keys))
        self._num_pending += len(keys)
        if self._num_pending > self._num_ids:
            self.begin()  # all that is there is less

    def _forget(self) -> None:
        self._runs.clear()
        self._num_pending = 0


def _packed(runs: list[tuple[bool, np.ndarray]]) -> tuple[bytes, bytes]:
    """Lengths of runs, those that were sealed first, and their keys, cut short."""
    lengths = [(are_sealed, sum(len(keys) for _, keys in some)) for are_sealed, some in groupby(runs, itemgetter(0))]
    if lengths and not lengths[0][0]:
        lengths.insert(0, (True, 0))
    keys = np.concatenate([keys for _, keys in runs]) if runs else np.zeros(0, f"V{KEY_BYTES}")
    short = np.ascontiguousarray(keys).view(SHORT_KEY).reshape(-1, KEY_BYTES // SHORT_KEY_BYTES)[:, 0]
    return pack_ids(length for _, length in lengths), short.tobytes()
