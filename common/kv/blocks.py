"""Which blocks of a pool are free: ids only, no memory, no torch."""

from collections.abc import Iterable
from typing import Protocol

from common.errors import KVError, OutOfBlocks, TransferFailed
from common.wire.kv_layout import PROOF_BLOCK


def check_sources(block_ids: list[int], num_blocks: int) -> None:
    """Raise TransferFailed for ids outside a peer's pool of `num_blocks`."""
    if block_ids and not 0 <= min(block_ids) <= max(block_ids) < num_blocks:
        raise TransferFailed(f"block ids {min(block_ids)} to {max(block_ids)}, the peer has {num_blocks}")


class Allocator(Protocol):
    """Hands out block ids; nothing that it says or does waits."""

    has_proof_block: bool
    """Whether the pool's proof block is this worker's, to copy a peer's into."""

    @property
    def num_free(self) -> int:
        """Blocks that can be had now."""
        ...

    @property
    def num_unused(self) -> int:
        """Blocks of the pool that this worker makes no use of."""
        ...

    @property
    def capacity(self) -> int:
        """Blocks that can be had at most."""
        ...

    def has(self, count: int) -> bool:
        """Whether `count` blocks can be had now; if not, and others have some, that they are wanted."""
        ...

    def is_exhausted(self) -> bool:
        """Whether what is missing now will not come but by blocks that are freed here."""
        ...

    def allocate(self, count: int) -> list[int]:
        """`count` blocks, or OutOfBlocks and none."""
        ...

    def free(self, block_ids: Iterable[int]) -> None:
        """Take blocks back that no launched step touches; raises KVError when one is not in use."""
        ...

    def check(self, owned: Iterable[list[int]]) -> None:
        """Raise KVError unless `owned` are all blocks in use, each once."""
        ...


class BlockAllocator:
    """Of a pool of this worker's own: all or nothing, and every id but the proof block is free or has one owner."""

    has_proof_block = True

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise KVError(f"a pool of {num_blocks} blocks holds nothing beside the proof block; enlarge kv.pool_bytes")
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, PROOF_BLOCK, -1))
        self._is_free = bytearray([1]) * num_blocks
        self._is_free[PROOF_BLOCK] = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def capacity(self) -> int:
        """Blocks that can be allocated at most."""
        return self.num_blocks - 1

    @property
    def num_unused(self) -> int:
        """The same as those that are free."""
        return len(self._free)

    def has(self, count: int) -> bool:
        """Whether so many are free."""
        return count <= len(self._free)

    def is_exhausted(self) -> bool:
        """Always: nobody else has blocks."""
        return True

    def allocate(self, count: int) -> list[int]:
        """`count` blocks, or OutOfBlocks and none."""
        if count > len(self._free):
            raise OutOfBlocks(f"{count} blocks wanted, {len(self._free)} of {self.capacity} free")
        taken = [self._free.pop() for _ in range(count)]
        for block_id in taken:
            self._is_free[block_id] = 0
        return taken

    def free(self, block_ids: Iterable[int]) -> None:
        """Take blocks back; raises KVError when one is free already, which would give it two owners."""
        for block_id in block_ids:
            if self._is_free[block_id] or block_id == PROOF_BLOCK:
                raise KVError(f"block {block_id} was freed twice")
            self._is_free[block_id] = 1
            self._free.append(block_id)

    def check(self, owned: Iterable[list[int]]) -> None:
        """Raise KVError unless `owned` and the free list together are every block, each once."""
        seen = [block_id for block_ids in owned for block_id in block_ids] + self._free
        if sorted(seen) != [i for i in range(self.num_blocks) if i != PROOF_BLOCK]:
            raise KVError(f"{len(seen)} blocks accounted for, {self.capacity} in the pool")
