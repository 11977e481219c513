"""What becomes of blocks that can be found by a key, for who keeps account of them elsewhere.

Nothing is kept until somebody asks. Then he is told of all that are there, block id by block id, and of those that are
in host memory only, slot by slot, some at a time, and in between of what happens meanwhile. What is told of a block
twice is told in order, so that the last word counts: he knows how things are once all ids and slots have had their
turn.

Blocks come and go by the thousand while all workers wait, so what happens is noted as it is named, in arrays, and put
together when it is sent.
"""

from collections import deque
from collections.abc import Callable, Sequence
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple, Protocol

import numpy as np

from common.wire.messages.memory_reports import BlockEvent
from common.wire.values.fields import KEY_BYTES, MAX_EVENT_KEYS, SHORT_KEY_BYTES
from common.wire.values.packing import pack_ids

SHORT_KEY = np.dtype(f"V{SHORT_KEY_BYTES}")
KeysBetween = Callable[[int, int], np.ndarray]
"""Of blocks with ids from one number to another, those that can be found: [num_found] keys."""


class HostBlocks(Protocol):
    """Blocks of a pool that are in host memory, too, or only there: by slot, and by key."""

    @property
    def num_slots(self) -> int: ...

    @property
    def copy_us(self) -> int:
        """What copying one back takes, in microseconds; 0 where that is not known."""

    def touch(self, keys: Sequence[bytes]) -> None:
        """Nobody reads these in the pool any more, in the order in which they go there."""

    def have(self, keys: Sequence[bytes]) -> np.ndarray:
        """Whether each is there: [num_keys] bool."""

    def parked_between(self, begin: int, end: int) -> np.ndarray:
        """Of slots with numbers from one to another, those whose blocks are there only: [num_parked] keys."""


class Told(NamedTuple):
    """What is to be told next, as `KVEvents` has it."""

    sequence: int
    kinds: bytes
    runs: bytes
    keys: bytes
    copy_us: int


class EventLog:
    """Of one pool, whose blocks have ids below `num_ids`."""

    def __init__(self, num_ids: int, keys_between: KeysBetween) -> None:
        self.is_on = False
        self._num_ids, self._keys_between = num_ids, keys_between
        self._host: HostBlocks | None = None
        self._sequence = 0
        self._num_walked = num_ids  # ids below have been told of, and then as many slots
        self._runs: deque[tuple[BlockEvent, np.ndarray]] = deque()  # [num_keys] keys
        self._num_pending = 0  # keys in those

    @property
    def has_news(self) -> bool:
        return self.is_on and bool(self._num_pending or self._num_walked < self._num_places)

    def begin(self) -> None:
        """Tell of everything."""
        self.is_on, self._sequence, self._num_walked = True, 0, 0
        self._forget()

    def attach(self, host: HostBlocks | None) -> None:
        """From now on blocks are in that host memory, too; None: in none."""
        self._host = host
        if self.is_on:
            self.begin()

    def void(self) -> None:
        """Nothing is to be found there any more, whatever happens."""
        self._num_ids = 0
        self.attach(None)

    def stop(self) -> None:
        """Nobody listens."""
        self.is_on = False
        self._forget()

    def note(self, event: BlockEvent, keys: np.ndarray) -> None:
        """That became of the blocks of these: [num_blocks] keys."""
        if not (self.is_on and self._num_ids and len(keys)):
            return
        self._runs.append((event, keys))
        self._num_pending += len(keys)
        if self._num_pending > self._num_places:
            self.begin()  # all that is there is less

    def take(self) -> Told:
        """What is to be told next, which may be nothing; it is taken to be told then."""
        runs, room = [], MAX_EVENT_KEYS
        while room and self._runs:
            event, keys = self._runs.popleft()
            if len(keys) > room:
                self._runs.appendleft((event, keys[room:]))
                keys = keys[:room]
            runs.append((event, keys))
            room -= len(keys)
            self._num_pending -= len(keys)
        if room and self._num_walked < self._num_places:
            runs.append(self._walk(room))
        sequence, self._sequence = self._sequence, self._sequence + 1
        copy_us = self._host.copy_us if self._host is not None else 0
        return Told(sequence, *_packed(runs), copy_us)

    @property
    def _num_places(self) -> int:
        return self._num_ids + (self._host.num_slots if self._host is not None else 0)

    def _walk(self, most: int) -> tuple[BlockEvent, np.ndarray]:
        """What there is of so many blocks or slots more, or fewer."""
        begin = self._num_walked
        if begin < self._num_ids:
            self._num_walked = min(begin + most, self._num_ids)
            return BlockEvent.SEALED, self._keys_between(begin, self._num_walked)
        assert self._host is not None, "there is more than ids"
        self._num_walked = min(begin + most, self._num_places)
        parked = self._host.parked_between(begin - self._num_ids, self._num_walked - self._num_ids)
        return BlockEvent.PARKED, parked

    def _forget(self) -> None:
        self._runs.clear()
        self._num_pending = 0


def _packed(runs: list[tuple[BlockEvent, np.ndarray]]) -> tuple[bytes, bytes, bytes]:
    """Kinds and lengths of runs, and their keys, cut short."""
    lengths = [(event, sum(len(keys) for _, keys in some)) for event, some in groupby(runs, itemgetter(0))]
    keys = np.concatenate([keys for _, keys in runs]) if runs else np.zeros(0, f"V{KEY_BYTES}")
    short = np.ascontiguousarray(keys).view(SHORT_KEY).reshape(-1, KEY_BYTES // SHORT_KEY_BYTES)[:, 0]
    kinds, counts = bytes(event for event, _ in lengths), pack_ids(count for _, count in lengths)
    return kinds, counts, short.tobytes()
