"""Sealed blocks of a pool: keys, readers, and the cached blocks ready for eviction.

    match:            a key finds a block, and the client becomes a reader of the block.
    last reader gone: the block is cached.
    evict:            the block is free for a new lease.

The first block sealed with a key is found by the key. Another block with an equal key serves only its reader, and is
free when the reader lets go. Eviction takes the block of a group read longest ago first. Of a text the end goes before
the beginning, because the end cannot be found without the beginning. Knows clients by number.

A text is found as far as it can be resumed (see `resumption`), so all groups have what its next token needs.

Messages name thousands of blocks. Only keys are looked up singly, in a dict; all else is arrays by block id.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from common.memory.blocks.cached import CachedBlocks
from common.memory.blocks.event_log import EventLog, HostBlocks
from common.memory.blocks.look_up import look_up
from common.memory.blocks.readers import NONE_NAMED, Named, Readers, named
from common.memory.blocks.slab_table import SlabTable
from common.wire.messages.memory_reports import BlockEvent
from common.wire.values.block_key import KEY, unpacked
from common.wire.values.kv_layout import Counts
from common.wire.values.pool_shape import PoolShape
from common.wire.values.resumption import needed, resumable

MOST_KNOWN = 64
"""Texts whose blocks are known between changes, because waiting prompts are looked up for every message."""


class CachedPrefix(NamedTuple):
    """Sealed blocks of the beginning of a text."""

    found: Sequence[np.ndarray]  # by group, in the order of places: [num_blocks] intp
    num_places: int  # the text can be resumed behind them
    num_alike: int  # leading places with blocks in all append-only groups

    @property
    def block_ids(self) -> np.ndarray:
        """All blocks, group after group: [num_blocks] intp."""
        return self.found[0] if len(self.found) == 1 else np.concatenate(self.found)


class SealedBlocks:
    """Sealed blocks of a pool."""

    def __init__(self, shape: PoolShape, slabs: SlabTable) -> None:
        self.shape, self.layout, num_ids = shape, shape.layout, shape.num_ids
        self.slabs = slabs  # told which blocks are cached
        self.block_of: dict[bytes, int] = {}  # by key, in order of sealing
        self.key = np.zeros(num_ids, KEY)  # by block, valid where `is_found`
        self.is_found = np.zeros(num_ids, bool)
        self.readers = Readers(num_ids)
        self.cached = [CachedBlocks(num_ids) for _ in self.layout.groups]  # found and not read, by group
        self._found = dict[tuple[bytes, int, bool], CachedPrefix]()  # answers of `find` since the last change of keys
        self.tick = np.zeros(num_ids, np.int64)  # by block, order in which blocks were cached
        self._host: HostBlocks | None = None
        self.log = EventLog(num_ids, self._keys_between)

    def attach(self, host: HostBlocks | None) -> None:
        """Set the host memory that holds blocks too, or None."""
        self._host = host
        self.log.attach(host)

    def seal(self, client: int, block_ids: np.ndarray, keys: bytes) -> None:
        """Seal blocks, [num_blocks] intp, each once, with packed keys; the client becomes a reader."""
        self._found.clear()
        first_of_key = list(map(self.block_of.setdefault, unpacked(keys), block_ids.tolist()))
        are_first = np.array(first_of_key, np.intp) == block_ids
        found = block_ids[are_first]
        keys_of_found = np.frombuffer(keys, KEY)[are_first]
        self.key[found] = keys_of_found
        self.is_found[found] = True
        self.log.add(BlockEvent.SEALED, keys_of_found)
        self.readers.add(client, Named(block_ids, 1, len(block_ids)))

    @property
    def num_cached(self) -> Counts:
        """Cached blocks by group."""
        return tuple(map(len, self.cached))

    def find(self, keys: bytes, first: int = 0, *, resumes: bool = True) -> CachedPrefix:
        """Return the blocks of a text that its leading packed keys find, from place `first` on.

        Args:
            resumes: find no more than the text can be resumed with. Otherwise, find blocks of append-only groups only.
        """
        name = keys, first, resumes
        if (known := self._found.get(name)) is None:
            if len(self._found) == MOST_KNOWN:
                self._found.clear()
            known = self._found[name] = self._find(*name)
        return known

    def _find(self, keys: bytes, first: int, resumes: bool) -> CachedPrefix:
        groups, ids = self.layout.groups, look_up(self.layout, keys, self.block_of.get)
        if self.layout.is_plain:
            return CachedPrefix(ids, len(ids[0]), len(ids[0]))
        num_places, num_alike = resumable(self.layout, [of_group >= 0 for of_group in ids])
        if not resumes:
            alike = [
                of_group if group.is_append_only else of_group[:0] for group, of_group in zip(groups, ids, strict=True)
            ]
            return CachedPrefix(alike, num_alike, num_alike)
        places = (needed(group, first + num_places, first) for group in groups)
        found = [of_group[at.start - first : at.stop - first] for of_group, at in zip(ids, places, strict=True)]
        return CachedPrefix(found, num_places, num_alike)

    def unread(self, found: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return those of distinct blocks that have no readers, by group: [num_blocks] intp each."""
        return [ids[self.readers.num_references[ids] == 0] for ids in found]

    def read(self, client: int, block_ids: np.ndarray) -> None:
        """Let a client read found blocks, [num_blocks] intp, once more each."""
        if len(block_ids):
            blocks = named(block_ids)
            unread = blocks.block_ids[self.readers.num_references[blocks.block_ids] == 0]
            self.slabs.uncache(unread)
            for cached, of_group in self._by_group(unread):
                cached.remove(of_group)
            self.readers.add(client, blocks)

    def _by_group(self, block_ids: np.ndarray) -> Sequence[tuple[CachedBlocks, np.ndarray]]:
        """Split blocks, [num_blocks] intp, by group, each with the group's cached blocks; the order stays."""
        if len(self.cached) == 1:
            return [(self.cached[0], block_ids)]
        groups = self.shape.groups_of(block_ids)
        return [(cached, block_ids[groups == number]) for number, cached in enumerate(self.cached)]

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

    def evict(self, group: int, count: int) -> np.ndarray:
        """Evict `count` cached blocks of a group and forget their keys: [count] intp.

        There must be so many, and `count` must be at least 1.
        """
        return self._unbound(self.cached[group].evict(count))

    def evict_these(self, group: int, block_ids: np.ndarray) -> np.ndarray:
        """Evict cached blocks of a group, [num_blocks] intp, forget their keys, and return the blocks."""
        self.cached[group].remove(block_ids)
        return self._unbound(block_ids)

    def _unbound(self, block_ids: np.ndarray) -> np.ndarray:
        """Forget the keys of blocks that are cached no more, [num_blocks] intp, and return the blocks."""
        self.slabs.uncache(block_ids)
        keys = self.key[block_ids]
        self._found.clear()
        for key in keys.tolist():
            del self.block_of[key]
        are_parked = np.zeros(len(block_ids), bool)
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
        self.slabs.cache(unread[are_found])
        self.tick[unread[are_found]] = self.slabs.tick
        for cached, of_group in self._by_group(unread[are_found]):
            cached.add(of_group)
        if self._host is not None and are_found.any():
            self._host.touch(self.key[unread[are_found]].tolist())
        free: np.ndarray = unread[~are_found]
        return free
