"""Sealed blocks of a pool: keys, readers, and the cached blocks ready for eviction.

    match:            a key finds a block, and the client becomes a reader of the block.
    last reader gone: the block is cached.
    evict:            the block is free for a new lease.

The first block sealed with a key is found by the key. Another block with an equal key serves only its reader, and is
free when the reader lets go. Eviction takes the block read longest ago first. Of a text the end goes before the
beginning, because the end cannot be found without the beginning. Knows clients by number.

Messages name thousands of blocks. Only keys are looked up singly, in a dict; all else is arrays by block id.
"""

from collections.abc import Sequence
from itertools import takewhile

import numpy as np

from common.memory.blocks.cached import CachedBlocks
from common.memory.blocks.event_log import EventLog, HostBlocks
from common.memory.blocks.readers import NONE_NAMED, Named, Readers, named
from common.wire.messages.memory_reports import BlockEvent
from common.wire.values.fields import KEY_BYTES

KEY = np.dtype(f"V{KEY_BYTES}")


class SealedBlocks:
    """Sealed blocks of a pool with ids below `num_ids`."""

    def __init__(self, num_ids: int) -> None:
        self.block_of: dict[bytes, int] = {}  # by key, in order of sealing
        self.key = np.zeros(num_ids, KEY)  # by block, valid where `is_found`
        self.is_found = np.zeros(num_ids, bool)
        self.readers = Readers(num_ids)
        self.cached = CachedBlocks(num_ids)  # found and not read
        self._host: HostBlocks | None = None
        self.log = EventLog(num_ids, self._keys_between)

    def attach(self, host: HostBlocks | None) -> None:
        """Set the host memory that holds blocks too, or None."""
        self._host = host
        self.log.attach(host)

    def seal(self, client: int, block_ids: np.ndarray, keys: bytes) -> None:
        """Seal blocks, [num_blocks] intp, each once, with packed keys; the client becomes a reader."""
        first_of_key = list(map(self.block_of.setdefault, unpacked(keys), block_ids.tolist()))
        are_first = np.array(first_of_key, np.intp) == block_ids
        found = block_ids[are_first]
        keys_of_found = np.frombuffer(keys, KEY)[are_first]
        self.key[found] = keys_of_found
        self.is_found[found] = True
        self.log.add(BlockEvent.SEALED, keys_of_found)
        self.readers.add(client, Named(block_ids, 1, len(block_ids)))

    def num_found(self, keys: Sequence[bytes]) -> int:
        """Return how many leading keys find a block."""
        return next((number for number, key in enumerate(keys) if key not in self.block_of), len(keys))

    def num_in_use(self, keys: bytes) -> int:
        """Return how many blocks found by the leading packed keys have readers."""
        found = self._found(keys)
        return int(np.count_nonzero(self.readers.num_references[found])) if len(found) else 0

    def match(self, client: int, keys: bytes) -> np.ndarray:
        """Return the blocks found by the leading packed keys: [num_found] intp.

        The client reads each of them once more.
        """
        block_ids = self._found(keys)
        if len(block_ids):
            blocks = named(block_ids)
            self.cached.remove(blocks.block_ids[self.readers.num_references[blocks.block_ids] == 0])
            self.readers.add(client, blocks)
        return block_ids

    def _found(self, keys: bytes) -> np.ndarray:
        """Return the blocks found by the leading packed keys: [num_found] intp."""
        block_ids = takewhile(lambda block_id: block_id is not None, map(self.block_of.get, unpacked(keys)))
        return np.array(list(block_ids), np.intp)

    def let_go(self, client: int, blocks: Named) -> np.ndarray:
        """End references, named in the order of a text. Return blocks now free: [num_free] intp.

        A block without readers is cached if a key finds the block, else free.
        """
        return self._cache(self.readers.remove(client, blocks)) if blocks.total else NONE_NAMED.block_ids

    def forget(self, client: int) -> np.ndarray:
        """End all references of a client after its end. Return blocks now free: [num_free] intp."""
        if (references := self.readers.pop(client)) is None:
            return NONE_NAMED.block_ids
        found = np.fromiter(self.block_of.values(), np.intp, len(self.block_of))
        its_own = np.flatnonzero((references > 0) & ~self.is_found)
        block_ids = np.concatenate([found[references[found] > 0], its_own])
        times = references[block_ids]
        return self._cache(self.readers.end(Named(block_ids, times, int(times.sum()))))

    def evict(self, count: int) -> np.ndarray:
        """Evict `count` cached blocks and forget their keys: [count] intp.

        There must be so many, and `count` must be at least 1.
        """
        block_ids = self.cached.evict(count)
        keys = self.key[block_ids]
        for key in keys.tolist():
            del self.block_of[key]
        are_parked = np.zeros(count, bool)
        if self._host is not None and self.log.is_on:
            are_parked = self._host.have(keys.tolist())
        self.log.add(BlockEvent.PARKED, keys[are_parked])
        self.log.add(BlockEvent.GONE, keys[~are_parked])
        self.is_found[block_ids] = False
        return block_ids

    def _keys_between(self, begin: int, end: int) -> np.ndarray:
        """Return keys of findable blocks with ids in [begin, end): [num_found] KEY."""
        keys: np.ndarray = self.key[begin:end][self.is_found[begin:end]]
        return keys

    def _cache(self, unread: np.ndarray) -> np.ndarray:
        """Cache unread blocks, [num_unread] intp, if a key finds them; return the others: [num_free] intp."""
        are_found = self.is_found[unread]
        self.cached.add(unread[are_found])
        if self._host is not None and are_found.any():
            self._host.touch(self.key[unread[are_found]].tolist())
        free: np.ndarray = unread[~are_found]
        return free


def unpacked(keys: bytes) -> list[bytes]:
    """Split packed keys into keys of 16 bytes."""
    each: list[bytes] = np.frombuffer(keys, KEY).tolist()
    return each
