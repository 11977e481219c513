"""Log of events of sealed blocks, for the router's account of them.

Nothing is kept until the router asks. Then the log tells of all sealed blocks, by block id, and of blocks parked in
host memory only, by slot. The walk is sent in parts, mixed with new events. Events of a block stay in order, so the
last event counts. The router's account is right once the walk is over.

Blocks come and go by the thousand while all workers wait. So events are logged as arrays of keys, and put together when
they are sent.
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
"""Keys of sealed blocks with ids in [begin, end): [num_found]."""


class HostBlocks(Protocol):
    """Blocks of a pool with a copy in host memory, by slot and by key."""

    @property
    def num_slots(self) -> int: ...

    @property
    def copy_us(self) -> int:
        """Microseconds to copy a block back; 0 if unknown."""

    def touch(self, keys: Sequence[bytes]) -> None:
        """Take keys of blocks read by nobody in the pool from now on, in eviction order."""

    def have(self, keys: Sequence[bytes]) -> np.ndarray:
        """Tell for each key whether its block is in host memory: [num_keys] bool."""

    def parked_between(self, begin: int, end: int) -> np.ndarray:
        """Return keys in slots [begin, end) whose blocks are in host memory only: [num_parked]."""


class Batch(NamedTuple):
    """Fields of the next `KVEvents`."""

    sequence: int
    kinds: bytes
    runs: bytes
    keys: bytes
    copy_us: int


class EventLog:
    """Events of a pool with block ids below `num_ids`."""

    def __init__(self, num_ids: int, keys_between: KeysBetween) -> None:
        self.is_on = False
        self._num_ids, self._keys_between = num_ids, keys_between
        self._host: HostBlocks | None = None
        self._sequence = 0
        self._num_walked = num_ids  # walked ids, then slots
        self._runs: deque[tuple[BlockEvent, np.ndarray]] = deque()  # [num_keys] keys
        self._num_pending = 0  # keys in `_runs`
        self._is_void = False  # what the router knows is wrong, until it asks again
        self._must_say_so = False  # by a message, whose number is not the next

    @property
    def has_news(self) -> bool:
        return self.is_on and bool(self._must_say_so or self._num_pending or self._num_walked < self._num_places)

    def begin(self) -> None:
        """Turn the log on at the router's request, and walk all blocks."""
        self.is_on, self._sequence, self._num_walked = True, 0, 0
        self._is_void = self._must_say_so = False
        self._forget()

    def attach(self, host: HostBlocks | None) -> None:
        """Set the host memory that holds blocks too, or None; earlier events are void."""
        self._host = host
        if self.is_on:
            self._break_off()

    def void(self) -> None:
        """Report no blocks from now on, whatever happens."""
        self._num_ids = 0
        self.attach(None)

    def stop(self) -> None:
        """Turn the log off."""
        self.is_on = False
        self._forget()

    def add(self, event: BlockEvent, keys: np.ndarray) -> None:
        """Log an event of the blocks with these keys: [num_blocks]."""
        if not (self.is_on and self._num_ids and len(keys)) or self._is_void:
            return
        self._runs.append((event, keys))
        self._num_pending += len(keys)
        if self._num_pending > self._num_places:
            self._break_off()  # a walk of all blocks is shorter

    def take(self) -> Batch:
        """Return the next events, possibly none; they count as sent."""
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
        self._must_say_so = False
        sequence, self._sequence = self._sequence, self._sequence + 1
        copy_us = self._host.copy_us if self._host is not None else 0
        return Batch(sequence, *_packed(runs), copy_us)

    @property
    def _num_places(self) -> int:
        return self._num_ids + (self._host.num_slots if self._host is not None else 0)

    def _walk(self, most: int) -> tuple[BlockEvent, np.ndarray]:
        """Return keys of at most `most` more block ids or slots."""
        begin = self._num_walked
        if begin < self._num_ids:
            self._num_walked = min(begin + most, self._num_ids)
            return BlockEvent.SEALED, self._keys_between(begin, self._num_walked)
        assert self._host is not None, "there is more than ids"
        self._num_walked = min(begin + most, self._num_places)
        parked = self._host.parked_between(begin - self._num_ids, self._num_walked - self._num_ids)
        return BlockEvent.PARKED, parked

    def _break_off(self) -> None:
        """Leave out a number, so that the router voids what it knows and asks again, even if a message is lost."""
        if not self._is_void:
            self._is_void = self._must_say_so = True
            self._sequence, self._num_walked = self._sequence + 1, self._num_places
        self._forget()

    def _forget(self) -> None:
        self._runs.clear()
        self._num_pending = 0


def _packed(runs: list[tuple[BlockEvent, np.ndarray]]) -> tuple[bytes, bytes, bytes]:
    """Return kinds of runs, lengths of runs, and shortened keys."""
    lengths = [(event, sum(len(keys) for _, keys in some)) for event, some in groupby(runs, itemgetter(0))]
    keys = np.concatenate([keys for _, keys in runs]) if runs else np.zeros(0, f"V{KEY_BYTES}")
    short = np.ascontiguousarray(keys).view(SHORT_KEY).reshape(-1, KEY_BYTES // SHORT_KEY_BYTES)[:, 0]
    kinds, counts = bytes(event for event, _ in lengths), pack_ids(count for _, count in lengths)
    return kinds, counts, short.tobytes()
