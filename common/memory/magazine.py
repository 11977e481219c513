"""Blocks that a worker leases of a shared pool: some at hand, so that no step waits for the memory server.

    the server ──leased──▶ at hand ──allocate──▶ in use ◀──adopt── an accepted offer
        ▲                    │   ▲                │   │
        └───────too many─────┘   └──────free──────┘   └──release──▶ another worker's, by an offer

Who finds too few says with that how many it lacks; what is lacking is asked for, comes whole, and waits a moment to be
used. While somebody waits for blocks, all but a floor goes back: nobody can wait for what others merely hold.
"""

import time
from collections.abc import Callable, Iterable, Sequence

from common.errors import KVError, OutOfBlocks
from common.wire.memory_messages import BlocksFreed, BlocksLeased, BlocksWanted, MemoryMessage
from common.wire.packing import pack_ids, unpack_ids

LACKING_S = 1.0
"""How long what somebody lacked is kept for him."""
PATIENCE_S = 0.1
"""For others to give back what they have at hand, before a sequence has to go."""


class Magazine:
    """The allocator of a worker that shares its pool. Torch-free.

    Args:
        num_blocks: of the pool, the proof block included.
        send: to the memory server.
    """

    has_proof_block = False  # it is the server's

    def __init__(
        self, num_blocks: int, send: Callable[[MemoryMessage], None], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.capacity = num_blocks - 1
        self._send, self._clock = send, clock
        self._at_hand: list[int] = []
        self._is_at_hand = bytearray(num_blocks)
        self._generation: dict[int, int] = {}  # of all that is leased
        self._lacking, self._lacking_s = 0, 0.0  # blocks that somebody lacked, and when he last said so
        self._wanted, self._wanted_s = 0, 0.0  # as the server was told, and since when some are
        self._is_short = False
        self._is_lost = False

    @property
    def num_free(self) -> int:
        """Blocks at hand."""
        return len(self._at_hand)

    @property
    def num_unused(self) -> int:
        """Blocks of the pool that nothing here uses."""
        return self.capacity - len(self._generation) + len(self._at_hand)

    def has(self, count: int) -> bool:
        """Whether `count` blocks are at hand; if not, they will be fetched."""
        if count > len(self._at_hand):
            self._lacking, self._lacking_s = max(self._lacking, count), self._clock()
        return count <= len(self._at_hand)

    def is_exhausted(self) -> bool:
        """Whether nobody has blocks to give, and waiting for some has been in vain."""
        has_waited = self._wanted > 0 and self._clock() - self._wanted_s > PATIENCE_S
        return self._is_lost or (self._is_short and has_waited)

    def allocate(self, count: int) -> list[int]:
        """`count` blocks, or OutOfBlocks and none."""
        if count > len(self._at_hand):
            raise OutOfBlocks(f"{count} blocks wanted, {len(self._at_hand)} at hand")
        if count >= self._lacking:
            self._lacking = 0
        return self._pop(count)

    def free(self, block_ids: Iterable[int]) -> None:
        """Take blocks back that nothing on the device touches; raises KVError for what is not in use here."""
        for block_id in block_ids:
            self._check_use(block_id)
            self._is_at_hand[block_id] = 1
            self._at_hand.append(block_id)

    def release(self, block_ids: Sequence[int]) -> list[int]:
        """Blocks in use become another's; returns their generations."""
        for block_id in block_ids:
            self._check_use(block_id)
        return [self._generation.pop(block_id) for block_id in block_ids]

    def adopt(self, block_ids: Sequence[int], generations: Sequence[int]) -> None:
        """Another's blocks are in use here."""
        self._generation.update(zip(block_ids, generations, strict=True))

    def leased(self, message: BlocksLeased) -> None:
        """The server gives what was wanted."""
        self._wanted = 0
        block_ids = unpack_ids(message.block_ids)
        self.adopt(block_ids, unpack_ids(message.generations))
        self.free(block_ids)

    def shortage(self, *, is_short: bool) -> None:
        """Others lack blocks, or we do; or nobody does."""
        self._is_short, self._wanted_s = is_short, self._clock()

    def lost(self) -> None:
        """The server is gone: what is here is all there will be."""
        self._is_lost = True

    def tend(self, level: int, floor: int) -> None:
        """Ask for what is lacking, and give back what is too much; call once a turn.

        Args:
            level: blocks to have at hand.
            floor: blocks to have at hand although others wait for some.
        """
        if self._is_lost:
            return
        now_s, at_hand = self._clock(), len(self._at_hand)
        if now_s - self._lacking_s > LACKING_S:
            self._lacking = 0
        if self._is_short:
            keep = self._lacking if floor < self._lacking <= at_hand else floor
            wanted = max(self._lacking, floor) - min(at_hand, keep)
        else:
            keep = max(3 * level, self._lacking)
            wanted = max(2 * level, self._lacking) - at_hand if at_hand < max(level, self._lacking) else 0
        self._want(min(max(wanted, 0), self.capacity), now_s)
        if at_hand > keep:  # after what is wanted in its place
            self._give_back(at_hand - (keep if self._is_short else max(2 * level, self._lacking)))

    def check(self, owned: Iterable[list[int]]) -> None:
        """Raise KVError unless `owned` are all blocks in use here, each once."""
        in_use = sorted(block_id for block_id in self._generation if not self._is_at_hand[block_id])
        if (seen := sorted(block_id for block_ids in owned for block_id in block_ids)) != in_use:
            raise KVError(f"{len(seen)} blocks accounted for, {len(in_use)} in use")

    def _want(self, count: int, now_s: float) -> None:
        """Say so if it is more than the server knows of, or less while that keeps others waiting."""
        if count > self._wanted or (count < self._wanted and (self._is_short or not count)):
            self._wanted_s = self._wanted_s if self._wanted else now_s
            self._wanted = count
            self._send(BlocksWanted(count))

    def _pop(self, count: int) -> list[int]:
        taken = [self._at_hand.pop() for _ in range(count)]
        for block_id in taken:
            self._is_at_hand[block_id] = 0
        return taken

    def _give_back(self, count: int) -> None:
        block_ids = self._pop(count)
        self._send(BlocksFreed(pack_ids(block_ids), pack_ids(self.release(block_ids))))

    def _check_use(self, block_id: int) -> None:
        if block_id not in self._generation or self._is_at_hand[block_id]:
            raise KVError(f"block {block_id} is not in use here: it was freed twice, or never leased")
