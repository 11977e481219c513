"""Blocks that nobody writes any more: by which keys they are found, who reads them, and which may go.

    sealed, read ──the last reader lets go──▶ cached ──evict──▶ the caller's to lease
          ▲────────────────match────────────────┘

The first block of a key is found by it; another of the same key is its reader's alone, and is free when he lets go.
Of cached blocks those go first that were read longest ago, and of one text its end before its beginning, without which
it would not be found. Knows clients by number.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

Key = bytes


class SealedBlocks:
    """Of one pool."""

    def __init__(self) -> None:
        self.block_of: dict[Key, int] = {}
        self.key_of: dict[int, Key] = {}  # of those that are found
        self.num_readings: Counter[int] = Counter()  # by block, those of offers included
        self.of_client: dict[int, Counter[int]] = {}  # by client and block
        self.cached: OrderedDict[int, None] = OrderedDict()  # not read; who was so for longest is first

    def seal(self, client: int, block_id: int, key: Key) -> None:
        """Its writer reads it from now on, and others may."""
        if key not in self.block_of:
            self.block_of[key] = block_id
            self.key_of[block_id] = key
        self.read(client, [block_id])

    def match(self, client: int, keys: Iterable[Key]) -> list[int]:
        """Blocks of the first keys, as far as there are some: the client reads each once more."""
        found = []
        for key in keys:
            if (block_id := self.block_of.get(key)) is None:
                break
            found.append(block_id)
        for block_id in found:
            self.cached.pop(block_id, None)
        self.read(client, found)
        return found

    def read(self, client: int, block_ids: Iterable[int]) -> None:
        """It reads each of these once more, which are sealed."""
        self.num_readings.update(ids := list(block_ids))
        self.of_client.setdefault(client, Counter()).update(ids)

    def readings(self, client: int) -> Counter[int]:
        """By block."""
        return self.of_client.get(client, Counter())

    def move(self, client: int, other: int, block_ids: Sequence[int]) -> None:
        """Another reads each of these once more in place of a client."""
        self._read_less(client, block_ids)
        self.of_client.setdefault(other, Counter()).update(block_ids)

    def let_go(self, client: int, block_ids: Sequence[int]) -> list[int]:
        """It reads each of these, in the order of a text, once less; returns those that nobody can find or reads."""
        self._read_less(client, block_ids)
        return self._unread(block_ids)

    def forget(self, client: int) -> list[int]:
        """It is gone, and reads nothing; as `let_go`."""
        return self._unread(list(self.of_client.pop(client, Counter()).elements()))

    def evict(self, count: int) -> list[int]:
        """So many cached blocks, of which there must be as many, are found no more."""
        evicted = [self.cached.popitem(last=False)[0] for _ in range(count)]
        for block_id in evicted:
            del self.block_of[self.key_of.pop(block_id)]
        return evicted

    def _read_less(self, client: int, block_ids: Sequence[int]) -> None:
        readings = self.of_client.get(client, Counter())
        for block_id in block_ids:
            readings[block_id] -= 1
            if not readings[block_id]:
                del readings[block_id]
        if not readings:
            self.of_client.pop(client, None)

    def _unread(self, block_ids: Sequence[int]) -> list[int]:
        free = []
        for block_id in reversed(block_ids):
            self.num_readings[block_id] -= 1
            if self.num_readings[block_id]:
                continue
            del self.num_readings[block_id]
            if block_id in self.key_of:
                self.cached[block_id] = None
            else:
                free.append(block_id)
        return free
