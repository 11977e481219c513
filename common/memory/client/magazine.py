"""Blocks leased from a shared pool: some are kept at hand, so no step waits for the memory server.

    leased:   the server's ──▶ at hand.
    allocate: at hand ──▶ in use.
    adopt:    an accepted offer's ──▶ in use.
    free:     in use ──▶ at hand.
    release:  in use ──▶ another worker's, by an offer.
    surplus:  at hand ──▶ the server's.

A full block is **sealed**. From then on the block is only read, here and by others with a text of equal beginning. A
sealed block is let go when its text ends.

A sequence without enough blocks says how many are lacking. Lacking blocks are wanted, come whole, and are kept at hand
for a moment. The smallest lack is served first, so a growing sequence never waits for a new prompt.

While a worker waits for blocks, all others give back all but a floor, so no worker waits for idle blocks. Then blocks
of a group go back too if blocks of another group are lacking. Counts are by group.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple

import numpy as np

from common.base.errors import KVError, OutOfBlocks
from common.memory.client.readings import Readings
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
from common.wire.values.block_key import pack_keys
from common.wire.values.kv_layout import Counts
from common.wire.values.packing import pack_ids, unpack_ids
from common.wire.values.pool_shape import PoolShape, are_enough, minus, shown

LACKING_S = 1.0
"""Lifetime of a lack that is not repeated."""
PATIENCE_S = 0.1
"""Wait for blocks from others, before a sequence is dropped."""


class Grant(NamedTuple):
    """Blocks of a prompt, of the first group."""

    found: list[int]  # sealed blocks of the prompt's first tokens
    fresh: list[int]  # to be filled


class Magazine:
    """Block allocator of a worker with a shared pool. Torch-free.

    Args:
        send: sends a message to the memory server.
    """

    def __init__(
        self, shape: PoolShape, send: Callable[[MemoryMessage], None], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.shape, self.capacity = shape, shape.capacity
        self._send, self._clock = send, clock
        self._at_hand: list[list[int]] = [[] for _ in self.capacity]  # by group
        self._is_at_hand = np.zeros(shape.num_ids, bool)
        self._generation = np.zeros(shape.num_ids, np.int32)  # by block; 0 if not leased
        self.readings = Readings(shape.num_ids)  # of sealed blocks
        self.unread: list[int] = []  # read no more; the server is told in `tend`
        self._unread_generations: list[int] = []
        self._num_leased = [0] * len(self.capacity)  # by group
        self._lacking, self._lacking_s = shape.layout.nothing, 0.0  # smallest lack, and its time
        self._is_said = False  # a lack was noted since the last `tend`; older lacks are outdated
        self._wanted, self._wanted_s = shape.layout.nothing, 0.0  # as told to the server, and since when
        self._is_short = False
        self._is_lost = False

    @property
    def num_free(self) -> Counts:
        """Blocks at hand, by group."""
        return tuple(map(len, self._at_hand))

    @property
    def num_unused(self) -> Counts:
        """Blocks of the pool not in use by this worker, by group."""
        columns = zip(self.capacity, self._num_leased, self._at_hand, strict=True)
        first, *others = (capacity - num_leased + len(at_hand) for capacity, num_leased, at_hand in columns)
        return (first - len(self.readings), *others)

    @property
    def is_short(self) -> bool:
        """Tell whether a worker waits for blocks of the pool."""
        return self._is_short

    @property
    def in_use(self) -> list[int]:
        """Leased blocks that are not at hand, and may be written."""
        in_use: list[int] = np.flatnonzero((self._generation != 0) & ~self._is_at_hand).tolist()
        return in_use

    def has(self, counts: Counts) -> bool:
        """Tell whether `counts` blocks are at hand."""
        return are_enough(self.num_free, counts)

    def fetch(self, counts: Counts) -> bool:
        """Tell whether `counts` blocks are at hand; if not, want them, unless a smaller lack is noted."""
        if self.has(counts):
            return True
        if not self._is_said or sum(counts) <= sum(self._lacking):
            self._lacking, self._lacking_s, self._is_said = counts, self._clock(), True
        return False

    def is_exhausted(self) -> bool:
        """Tell whether no worker has blocks to give, after a wait of `PATIENCE_S`."""
        has_waited = any(self._wanted) and self._clock() - self._wanted_s > PATIENCE_S
        return self._is_lost or (self._is_short and has_waited)

    def allocate(self, counts: Counts) -> list[list[int]]:
        """Take blocks of each group; raises OutOfBlocks, and takes none, if some are not at hand."""
        if not self.has(counts):
            raise OutOfBlocks(f"{shown(counts)} blocks wanted, {shown(self.num_free)} at hand")
        if are_enough(counts, self._lacking):
            self._lacking = self.shape.layout.nothing
        return self._pop(counts)

    def free(self, block_ids: Iterable[int]) -> None:
        """Take back blocks that no device work touches; raises KVError for blocks not in use here.

        Sealed blocks are let go, in the order of their text, because they cannot be written again.
        """
        freed = list(block_ids)
        if num_sealed := self.readings.num_first(freed):
            self._unread_generations += self.readings.take(freed[:num_sealed]).tolist()
            self.unread += freed[:num_sealed]
        if not (freed := freed[num_sealed:]):
            return
        self._is_at_hand[self._checked(freed)] = True
        for at_hand, of_group in zip(self._at_hand, self.shape.by_group(freed), strict=True):
            at_hand += of_group

    def generations(self, block_ids: Sequence[int]) -> np.ndarray:
        """Return generations of blocks in use, sealed blocks first: [num_ids] int32."""
        generations: np.ndarray = self._generation[np.asarray(block_ids, np.int32)]
        if num_sealed := self.readings.num_first(block_ids):
            generations[:num_sealed] = self.readings.generations(block_ids[:num_sealed])
        return generations

    def seal(self, block_ids: Sequence[int], digests: Sequence[bytes]) -> None:
        """Seal full blocks in use, not written by any step from now on.

        Raises KVError for blocks not in use here.
        """
        generations = self._release(block_ids)
        self.readings.add(block_ids, generations)
        self._send(BlocksSealed(pack_ids(block_ids), generations.tobytes(), pack_keys(digests)))

    def want_prompt(
        self, key: tuple[str, int], digests: Sequence[bytes], num_blocks: int, priority: int = 0, block_us: int = 0
    ) -> None:
        """Ask for all blocks of a prompt, found blocks included; `granted` takes the answer.

        Args:
            key: request id and attempt.
            block_us: microseconds to compute a block; faster restores from host memory come first. 0: no restores.
        """
        self._send(PromptWanted(*key, pack_keys(digests), block_us, num_blocks, priority))

    def unwant_prompt(self, key: tuple[str, int]) -> None:
        """Forget the wish for a prompt; the caller frees the blocks of a late answer."""
        self._send(PromptUnwanted(*key))

    def granted(self, message: PromptBlocks) -> Grant:
        """Take over the blocks of a prompt: found blocks to read, fresh blocks to use."""
        block_ids, generations = unpack_ids(message.block_ids), unpack_ids(message.generations)
        self.adopt(block_ids, generations, message.num_sealed)
        return Grant(block_ids[: message.num_sealed], block_ids[message.num_sealed :])

    def release(self, block_ids: Sequence[int]) -> np.ndarray:
        """Give blocks in use to another worker, sealed blocks first. Return generations: [num_ids] int32."""
        generations, num_sealed = self.generations(block_ids), self.readings.num_first(block_ids)
        self._release(block_ids[num_sealed:])
        if num_sealed:
            self.readings.take(block_ids[:num_sealed])
        return generations

    def adopt(self, block_ids: Sequence[int], generations: Sequence[int], num_sealed: int = 0) -> None:
        """Take over blocks of another worker; the first `num_sealed` are sealed."""
        if num_sealed:
            self.readings.add(block_ids[:num_sealed], generations[:num_sealed])
            block_ids, generations = block_ids[num_sealed:], generations[num_sealed:]
        self._count(block_ids, 1)
        self._generation[np.asarray(block_ids, np.int32)] = generations

    @property
    def leases(self) -> dict[int, int]:
        """Generation of each leased block."""
        block_ids = np.flatnonzero(self._generation)
        return dict(zip(block_ids.tolist(), self._generation[block_ids].tolist(), strict=True))

    def leased(self, message: BlocksLeased) -> None:
        """Put leased blocks at hand; the server has answered the last want."""
        self._wanted = self.shape.layout.nothing
        block_ids = unpack_ids(message.block_ids)
        self.adopt(block_ids, unpack_ids(message.generations))
        self.free(block_ids)

    def shortage(self, *, is_short: bool) -> None:
        """Note whether a worker waits for blocks of the pool."""
        self._is_short, self._wanted_s = is_short, self._clock()

    def lost(self) -> None:
        """Note the end of the server: no more blocks will come."""
        self._is_lost = True

    def tend(self, level: Counts, floor: Counts, *, is_busy: bool = False) -> None:
        """Ask for lacking blocks, and give back surplus; call once a turn.

        Args:
            level: blocks to have at hand.
            floor: blocks to have at hand while others wait for some.
            is_busy: a step runs, so a lack could not be repeated and stays valid.
        """
        if self._is_lost:
            return
        self._say_unread()
        now_s, at_hand = self._clock(), self.num_free
        if is_busy:
            self._lacking_s = now_s
        elif now_s - self._lacking_s > LACKING_S:
            self._lacking = self.shape.layout.nothing
        self._is_said = False
        is_complete = are_enough(at_hand, self._lacking)  # lacking blocks wait to be used
        levels = zip(at_hand, self._lacking, level, floor, self.capacity, strict=True)
        decide = partial(_short_of, is_complete=is_complete) if self._is_short else _usual
        decided = [decide(*of_group) for of_group in levels]
        self._want(tuple(wanted for wanted, _ in decided), now_s)
        if any(surplus := tuple(surplus for _, surplus in decided)):  # after the want
            self._give_back(surplus)

    def check(self, owned: Iterable[Iterable[int]]) -> None:
        """Raise KVError unless `owned` lists each block in use once, and each sealed block as often as read."""
        seen = sorted(block_id for block_ids in owned for block_id in block_ids)
        in_use = sorted([*self.in_use, *self.readings])
        if seen != in_use:
            raise KVError(f"{len(seen)} blocks accounted for, {len(in_use)} in use")

    def _say_unread(self) -> None:
        if self.unread:
            self._send(BlocksFreed(pack_ids(self.unread), pack_ids(self._unread_generations)))
            self.unread, self._unread_generations = [], []

    def _want(self, counts: Counts, now_s: float) -> None:
        """Tell the server of a want that grew, or shrank while others wait."""
        is_more = any(minus(counts, self._wanted))
        if is_more or (counts != self._wanted and (self._is_short or not any(counts))):
            self._wanted_s = self._wanted_s if any(self._wanted) else now_s
            self._wanted = counts
            self._send(BlocksWanted(counts))

    def _pop(self, counts: Counts) -> list[list[int]]:
        taken = []
        for at_hand, count in zip(self._at_hand, counts, strict=True):
            taken.append(at_hand[: -count - 1 : -1])
            del at_hand[len(at_hand) - count :]
            self._is_at_hand[taken[-1]] = False
        return taken

    def _give_back(self, counts: Counts) -> None:
        block_ids = list(chain.from_iterable(self._pop(counts)))
        self._send(BlocksFreed(pack_ids(block_ids), self._release(block_ids).tobytes()))

    def _release(self, block_ids: Sequence[int]) -> np.ndarray:
        """End leases of blocks, and return generations."""
        ids = self._checked(block_ids)
        generations: np.ndarray = self._generation[ids]
        self._generation[ids] = 0
        self._count(block_ids, -1)
        return generations

    def _count(self, block_ids: Sequence[int], sign: int) -> None:
        for number, count in enumerate(self.shape.count(block_ids)):
            self._num_leased[number] += sign * count

    def _checked(self, block_ids: Sequence[int]) -> np.ndarray:
        """Return the ids as an array; raises KVError unless each block is in use here and named once."""
        ids = np.asarray(block_ids, np.int32)
        are_in_use = (self._generation[ids] != 0) & ~self._is_at_hand[ids]
        if not are_in_use.all():
            raise KVError(f"block {ids[~are_in_use][0]} is not in use here: it was freed twice, or never leased")
        if len(set(block_ids)) != len(ids):
            raise KVError(f"a block is named twice among {len(ids)}")
        return ids


def _usual(at_hand: int, lacking: int, level: int, floor: int, capacity: int) -> tuple[int, int]:
    """Return blocks of a group to want and to give back, without a shortage."""
    wanted = max(2 * level, lacking) - at_hand if at_hand < max(level, lacking) else 0
    surplus = at_hand - max(2 * level, lacking) if at_hand > max(3 * level, lacking) else 0
    return min(max(wanted, 0), capacity), surplus


def _short_of(
    at_hand: int, lacking: int, level: int, floor: int, capacity: int, *, is_complete: bool
) -> tuple[int, int]:
    """Return blocks of a group to want and to give back, during a shortage."""
    keep = lacking if is_complete and lacking > floor else floor
    wanted = max(lacking, floor) - min(at_hand, keep)
    return min(max(wanted, 0), capacity), max(0, at_hand - keep)
