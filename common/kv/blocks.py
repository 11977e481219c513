"""Ids of blocks: which are somebody's to use, and which a peer has. No memory, no torch."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from common.base.errors import TransferFailed
from common.wire.values.kv_layout import Counts
from common.wire.values.pool_shape import PoolShape


def check_sources(block_ids: Sequence[int], num_blocks: int) -> None:
    """Raise TransferFailed for ids outside a peer's pool of `num_blocks`."""
    if block_ids and not 0 <= min(block_ids) <= max(block_ids) < num_blocks:
        raise TransferFailed(f"block ids {min(block_ids)} to {max(block_ids)}, the peer has {num_blocks}")


class Allocator(Protocol):
    """Hands out block ids; nothing that it says or does waits. Counts are by group."""

    shape: PoolShape
    capacity: Counts
    """Blocks that can be had at most."""

    @property
    def num_free(self) -> Counts:
        """Blocks that can be had now."""
        ...

    @property
    def num_unused(self) -> Counts:
        """Blocks of the pool that this worker makes no use of."""
        ...

    def has(self, counts: Counts) -> bool:
        """Whether so many can be had now, of every group."""
        ...

    def fetch(self, counts: Counts) -> bool:
        """The same; if not, and others have some, they are asked for."""
        ...

    def is_exhausted(self) -> bool:
        """Whether what is missing now will not come but by blocks that are freed here."""
        ...

    def allocate(self, counts: Counts) -> list[list[int]]:
        """So many blocks of each group, or OutOfBlocks and none."""
        ...

    def free(self, block_ids: Iterable[int]) -> None:
        """Take blocks back that no launched step touches; raises KVError when one is not in use."""
        ...

    def check(self, owned: Iterable[Iterable[int]]) -> None:
        """Raise KVError unless `owned` are all blocks in use, each once."""
        ...
