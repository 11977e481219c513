"""Blocks leased from a shared pool: some are kept at hand, so no step waits for the memory server.

    leased:   the server's ──▶ at hand.
    allocate: at hand ──▶ in use.
    adopt:    an accepted offer's ──▶ in use.
    free:     in use ──▶ at hand.
    release:  in use ──▶ another worker's, by an offer.
    surplus:  at hand ──▶ the server's.

A full block is **sealed**. From then on the block is only read, here and by others with a text of equal beginning. A
sealed block is let go when its text ends.

A sequence without enough blocks says how many are lacking (see `demand`). Lacking blocks are wanted, come whole, and
are kept at hand for a moment.

While a worker waits for blocks, all others give back all but a floor, so no worker waits for idle blocks. Then blocks
of a group go back too if blocks of another group are lacking. Counts are by group.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from common.base.errors import OutOfBlocks
from common.memory.client.demand import Demand
from common.memory.client.held_blocks import HeldBlocks
from common.wire.messages.memory import (
    BlocksFreed,
    BlocksLeased,
    BlocksSealed,
    BlocksWanted,
    MemoryMessage,
    PromptBlocks,
    PromptUnwanted,
    PromptWanted,
)
from common.wire.values.block_key import keys_in_group, pack_keys
from common.wire.values.kv_layout import Counts
from common.wire.values.packing import pack_ids, unpack_ids
from common.wire.values.pool_shape import PoolShape, are_enough, shown


class Grant(NamedTuple):
    """Blocks of a prompt, by group.

    Found blocks of append-only groups and windows end at place `num_places`. Those of states are snapshots taken there.
    """

    found: list[list[int]]  # sealed
    fresh: list[list[int]]  # to be filled
    num_places: int  # leading places that need no computing
    num_alike: int  # leading places with sealed blocks in all append-only groups

    @property
    def block_ids(self) -> list[int]:
        """All blocks."""
        return list(chain.from_iterable([*self.found, *self.fresh]))


class LeaseCache(HeldBlocks):
    """Block allocator of a worker with a shared pool. Torch-free.

    Args:
        send: sends a message to the memory server.
    """

    def __init__(
        self, shape: PoolShape, send: Callable[[MemoryMessage], None], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(shape)
        self.capacity, self._send = shape.capacity, send
        self.demand = Demand(shape, clock=clock)
        self.unread: list[int] = []  # read no more; `update` tells the server
        self._unread_generations: list[int] = []
        self.is_lost = False  # no more blocks will come, because the server is lost

    def fetch(self, counts: Counts) -> bool:
        """Tell whether `counts` blocks are at hand; if not, want them, unless a smaller lack is known."""
        if are_enough(self.num_free, counts):
            return True
        self.demand.lack(counts)
        return False

    def is_exhausted(self) -> bool:
        """Tell whether no worker has blocks to give, after a wait."""
        return self.is_lost or self.demand.is_in_vain

    def allocate(self, counts: Counts) -> list[list[int]]:
        """Take blocks of each group; raises OutOfBlocks, and takes none, if some are not at hand."""
        if not are_enough(self.num_free, counts):
            raise OutOfBlocks(f"{shown(counts)} blocks wanted, {shown(self.num_free)} at hand")
        self.demand.use(counts)
        return self.take(counts)

    def free(self, block_ids: Iterable[int]) -> None:
        """Take back blocks that no device work touches; raises KVError for blocks not in use here.

        Sealed blocks are let go, in the order of their text, because they cannot be written again.
        """
        freed = list(block_ids)
        are_read = self.references.are_read(freed)
        if are_read.any():
            ids = np.array(freed, np.int32)
            self._unread_generations += self.references.end(ids[are_read]).tolist()
            self.unread += ids[are_read].tolist()
            freed = ids[~are_read].tolist()
        if freed:
            self.put_back(freed)

    def seal(self, block_ids: Sequence[int], digests: Sequence[bytes]) -> None:
        """Seal blocks in use, not written by any step from now on, each under a digest and its group.

        Raises KVError for blocks not in use here.
        """
        generations = self.end(block_ids)
        self.references.add(block_ids, generations)
        keys = pack_keys(digests)
        if len(self.capacity) > 1:
            keys = keys_in_group(keys, self.shape.groups_of(np.array(block_ids, np.int32)))
        self._send(BlocksSealed(pack_ids(block_ids), generations.tobytes(), keys))

    def want_prompt(
        self,
        key: tuple[str, int],
        digests: Sequence[bytes],
        num_blocks: Counts,
        priority: int = 0,
        block_us: int = 0,
        *,
        resumes: bool = True,
        num_snapshots: int = 0,
    ) -> None:
        """Ask for all blocks of a prompt, found blocks included; `granted` takes the answer.

        Args:
            key: request id and attempt.
            block_us: microseconds to compute a block; faster restores from host memory come first. 0: no restores.
            resumes: false finds blocks of append-only groups only, because the others come from elsewhere.
            num_snapshots: more blocks of each state, if they are free.
        """
        self._send(PromptWanted(*key, pack_keys(digests), block_us, num_blocks, priority, 0, resumes, num_snapshots))

    def unwant_prompt(self, key: tuple[str, int]) -> None:
        """Withdraw the request for a prompt; the caller frees the blocks of a late answer."""
        self._send(PromptUnwanted(*key))

    def granted(self, message: PromptBlocks) -> Grant:
        """Take over the blocks of a prompt: found blocks to read, fresh blocks to use."""
        block_ids, generations = unpack_ids(message.block_ids), unpack_ids(message.generations)
        found, fresh = block_ids[: message.num_sealed], block_ids[message.num_sealed :]
        self.adopt(block_ids, generations, np.arange(len(block_ids)) < len(found))
        found_of, fresh_of = ([*map(list, self.shape.by_group(ids))] for ids in (found, fresh))
        return Grant(found_of, fresh_of, message.num_places, message.num_alike)

    def receive(self, message: BlocksLeased) -> None:
        """Put leased blocks at hand; the server has answered the last want."""
        self.demand.answered()
        block_ids = unpack_ids(message.block_ids)
        self.adopt(block_ids, unpack_ids(message.generations))
        self.put_back(block_ids)

    def update(self, level: Counts, floor: Counts, *, is_busy: bool = False) -> None:
        """Ask for lacking blocks, and give back surplus; call once a turn.

        Args:
            level: blocks to have at hand.
            floor: blocks to have at hand while others wait for some.
            is_busy: a step runs, so a lack could not be repeated and stays valid.
        """
        if self.is_lost:
            return
        if self.unread:
            self._send(BlocksFreed(pack_ids(self.unread), pack_ids(self._unread_generations)))
            self.unread, self._unread_generations = [], []
        wanted, surplus = self.demand.decide(self.num_free, level, floor, is_busy=is_busy)
        if wanted is not None:
            self._send(BlocksWanted(wanted))
        if any(surplus):
            block_ids = list(chain.from_iterable(self.take(surplus)))
            self._send(BlocksFreed(pack_ids(block_ids), self.end(block_ids).tobytes()))
