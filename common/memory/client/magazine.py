"""Blocks that a worker leases of a shared pool: some at hand, so that no step waits for the memory server.

    the server ──leased──▶ at hand ──allocate──▶ in use ◀──adopt── an accepted offer
        ▲                    │   ▲                │   │
        └───────too many─────┘   └──────free──────┘   └──release──▶ another worker's, by an offer

What is full and will not be written again is **sealed**: from then on it is read only, here and by whoever begins a
text alike, and let go when the text ends.

Who finds too few says with that how many it lacks; what is lacking is asked for, comes whole, and waits a moment to be
used. Who lacks least is served first: so a sequence that grows never waits for a prompt that is to begin. While
somebody waits for blocks, all but a floor goes back: nobody can wait for what others merely hold. So it is with blocks
of one group that are of no use yet for want of those of another. Counts are by group.
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
"""How long what somebody lacked is kept for him, who might have said so again."""
PATIENCE_S = 0.1
"""For others to give back what they have at hand, before a sequence has to go."""


class Grant(NamedTuple):
    """All blocks of a prompt, of the first group."""

    found: list[int]  # of its first tokens, sealed and read here
    fresh: list[int]  # to be filled


class Magazine:
    """The allocator of a worker that shares its pool. Torch-free.

    Args:
        shape: of the pool.
        send: to the memory server.
    """

    def __init__(
        self, shape: PoolShape, send: Callable[[MemoryMessage], None], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.shape, self.capacity = shape, shape.capacity
        self._send, self._clock = send, clock
        self._at_hand: list[list[int]] = [[] for _ in self.capacity]  # by group
        self._is_at_hand = np.zeros(shape.num_ids, bool)
        self._generation = np.zeros(shape.num_ids, np.int32)  # of all that is leased; 0 of what is not
        self.readings = Readings(shape.num_ids)  # of what is sealed
        self.unread: list[int] = []  # read no more, which is not said yet, with their generations
        self._unread_generations: list[int] = []
        self._num_leased = [0] * len(self.capacity)  # by group
        self._lacking, self._lacking_s = shape.layout.nothing, 0.0  # the least that somebody lacks, and when he said so
        self._is_said = False  # since the last `tend`: what was said before has grown, or is no longer lacking
        self._wanted, self._wanted_s = shape.layout.nothing, 0.0  # as the server was told, and since when some are
        self._is_short = False
        self._is_lost = False

    @property
    def num_free(self) -> Counts:
        """Blocks at hand."""
        return tuple(map(len, self._at_hand))

    @property
    def num_unused(self) -> Counts:
        """Blocks of the pool that nothing here uses."""
        columns = zip(self.capacity, self._num_leased, self._at_hand, strict=True)
        first, *others = (capacity - num_leased + len(at_hand) for capacity, num_leased, at_hand in columns)
        return (first - len(self.readings), *others)

    @property
    def is_short(self) -> bool:
        """Whether some worker waits for blocks of the pool."""
        return self._is_short

    @property
    def in_use(self) -> list[int]:
        """Blocks that are leased and not at hand, and may be written."""
        in_use: list[int] = np.flatnonzero((self._generation != 0) & ~self._is_at_hand).tolist()
        return in_use

    def has(self, counts: Counts) -> bool:
        """Whether so many are at hand of each group."""
        return are_enough(self.num_free, counts)

    def fetch(self, counts: Counts) -> bool:
        """Whether so many are at hand of each group; if not, they are asked for, before all that is more."""
        if self.has(counts):
            return True
        if not self._is_said or sum(counts) <= sum(self._lacking):
            self._lacking, self._lacking_s, self._is_said = counts, self._clock(), True
        return False

    def is_exhausted(self) -> bool:
        """Whether nobody has blocks to give, and waiting for some has been in vain."""
        has_waited = any(self._wanted) and self._clock() - self._wanted_s > PATIENCE_S
        return self._is_lost or (self._is_short and has_waited)

    def allocate(self, counts: Counts) -> list[list[int]]:
        """So many blocks of each group, or OutOfBlocks and none."""
        if not self.has(counts):
            raise OutOfBlocks(f"{shown(counts)} blocks wanted, {shown(self.num_free)} at hand")
        if are_enough(counts, self._lacking):
            self._lacking = self.shape.layout.nothing
        return self._pop(counts)

    def free(self, block_ids: Iterable[int]) -> None:
        """Take blocks back that nothing on the device touches; raises KVError for what is not in use here.

        What is sealed is of no use at hand: it is let go, in the order of its text.
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
        """By which the server knows these blocks, which are in use, those that are sealed first: [num_ids] int32."""
        generations: np.ndarray = self._generation[np.asarray(block_ids, np.int32)]
        if num_sealed := self.readings.num_first(block_ids):
            generations[:num_sealed] = self.readings.generations(block_ids[:num_sealed])
        return generations

    def seal(self, block_ids: Sequence[int], digests: Sequence[bytes]) -> None:
        """Blocks in use are full, and no step writes them any more; raises KVError for what is not in use here."""
        generations = self._release(block_ids)
        self.readings.add(block_ids, generations)
        self._send(BlocksSealed(pack_ids(block_ids), generations.tobytes(), pack_keys(digests)))

    def want_prompt(
        self, key: tuple[str, int], digests: Sequence[bytes], num_blocks: int, priority: int = 0, block_us: int = 0
    ) -> None:
        """Ask for all blocks of a prompt, those that are found by its digests included; `granted` takes the answer.

        Args:
            key: request id and attempt.
            block_us: what computing a block takes; what is in host memory is restored if that is faster.
        """
        self._send(PromptWanted(*key, pack_keys(digests), block_us, num_blocks, priority))

    def unwant_prompt(self, key: tuple[str, int]) -> None:
        """Forget what was asked for a prompt; an answer that comes all the same is to be freed."""
        self._send(PromptUnwanted(*key))

    def granted(self, message: PromptBlocks) -> Grant:
        """Take over the blocks of a prompt: some are read here once more, the others are in use."""
        block_ids, generations = unpack_ids(message.block_ids), unpack_ids(message.generations)
        self.adopt(block_ids, generations, message.num_sealed)
        return Grant(block_ids[: message.num_sealed], block_ids[message.num_sealed :])

    def release(self, block_ids: Sequence[int]) -> np.ndarray:
        """Blocks in use, those that are sealed first, become another's; returns their generations: [num_ids] int32."""
        generations, num_sealed = self.generations(block_ids), self.readings.num_first(block_ids)
        self._release(block_ids[num_sealed:])
        if num_sealed:
            self.readings.take(block_ids[:num_sealed])
        return generations

    def adopt(self, block_ids: Sequence[int], generations: Sequence[int], num_sealed: int = 0) -> None:
        """Another's blocks are in use here; the first of them are sealed."""
        if num_sealed:
            self.readings.add(block_ids[:num_sealed], generations[:num_sealed])
            block_ids, generations = block_ids[num_sealed:], generations[num_sealed:]
        self._count(block_ids, 1)
        self._generation[np.asarray(block_ids, np.int32)] = generations

    @property
    def leases(self) -> dict[int, int]:
        """All blocks that are leased here, each with its generation."""
        block_ids = np.flatnonzero(self._generation)
        return dict(zip(block_ids.tolist(), self._generation[block_ids].tolist(), strict=True))

    def leased(self, message: BlocksLeased) -> None:
        """The server gives what was wanted."""
        self._wanted = self.shape.layout.nothing
        block_ids = unpack_ids(message.block_ids)
        self.adopt(block_ids, unpack_ids(message.generations))
        self.free(block_ids)

    def shortage(self, *, is_short: bool) -> None:
        """Others lack blocks, or we do; or nobody does."""
        self._is_short, self._wanted_s = is_short, self._clock()

    def lost(self) -> None:
        """The server is gone: what is here is all there will be."""
        self._is_lost = True

    def tend(self, level: Counts, floor: Counts, *, is_busy: bool = False) -> None:
        """Ask for what is lacking, and give back what is too much; call once a turn.

        Args:
            level: blocks to have at hand.
            floor: blocks to have at hand although others wait for some.
            is_busy: who lacked some could not say so again, which may take as long as a step.
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
        is_complete = are_enough(at_hand, self._lacking)  # what is lacking waits to be used
        levels = zip(at_hand, self._lacking, level, floor, self.capacity, strict=True)
        decide = partial(_short_of, is_complete=is_complete) if self._is_short else _usual
        decided = [decide(*of_group) for of_group in levels]
        self._want(tuple(wanted for wanted, _ in decided), now_s)
        if any(surplus := tuple(surplus for _, surplus in decided)):  # after what is wanted in its place
            self._give_back(surplus)

    def check(self, owned: Iterable[Iterable[int]]) -> None:
        """Raise KVError unless `owned` are all blocks in use here, each once, or as often as it is read."""
        seen = sorted(block_id for block_ids in owned for block_id in block_ids)
        in_use = sorted([*self.in_use, *self.readings])
        if seen != in_use:
            raise KVError(f"{len(seen)} blocks accounted for, {len(in_use)} in use")

    def _say_unread(self) -> None:
        if self.unread:
            self._send(BlocksFreed(pack_ids(self.unread), pack_ids(self._unread_generations)))
            self.unread, self._unread_generations = [], []

    def _want(self, counts: Counts, now_s: float) -> None:
        """Say so if it is more than the server knows of, or less while that keeps others waiting."""
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
        """These are leased no more; returns their generations."""
        ids = self._checked(block_ids)
        generations: np.ndarray = self._generation[ids]
        self._generation[ids] = 0
        self._count(block_ids, -1)
        return generations

    def _count(self, block_ids: Sequence[int], sign: int) -> None:
        for number, count in enumerate(self.shape.count(block_ids)):
            self._num_leased[number] += sign * count

    def _checked(self, block_ids: Sequence[int]) -> np.ndarray:
        """These; raises KVError unless each is in use here, and named once."""
        ids = np.asarray(block_ids, np.int32)
        are_in_use = (self._generation[ids] != 0) & ~self._is_at_hand[ids]
        if not are_in_use.all():
            raise KVError(f"block {ids[~are_in_use][0]} is not in use here: it was freed twice, or never leased")
        if len(set(block_ids)) != len(ids):
            raise KVError(f"a block is named twice among {len(ids)}")
        return ids


def _usual(at_hand: int, lacking: int, level: int, floor: int, capacity: int) -> tuple[int, int]:
    """Blocks of a group to want, and to give back, when nobody waits for others."""
    wanted = max(2 * level, lacking) - at_hand if at_hand < max(level, lacking) else 0
    surplus = at_hand - max(2 * level, lacking) if at_hand > max(3 * level, lacking) else 0
    return min(max(wanted, 0), capacity), surplus


def _short_of(
    at_hand: int, lacking: int, level: int, floor: int, capacity: int, *, is_complete: bool
) -> tuple[int, int]:
    """The same while somebody waits."""
    keep = lacking if is_complete and lacking > floor else floor
    wanted = max(lacking, floor) - min(at_hand, keep)
    return min(max(wanted, 0), capacity), max(0, at_hand - keep)
