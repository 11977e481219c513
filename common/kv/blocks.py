"""Ids of blocks: the allocator's interface. No memory, no torch."""

from collections.abc import Iterable
from typing import Protocol

from common.wire.values.kv_layout import Counts
from common.wire.values.pool_shape import PoolShape


class Allocator(Protocol):
    """Allocator of block ids; never waits. Counts are by group."""

    shape: PoolShape
    capacity: Counts
    """Largest number of blocks that can be allocated."""

    @property
    def num_free(self) -> Counts:
        """Blocks available now."""
        ...

    @property
    def num_unused(self) -> Counts:
        """Blocks of the pool that this worker does not use."""
        ...

    def fetch(self, counts: Counts) -> bool:
        """Tell whether `counts` blocks are available now; if not, ask other workers for some."""
        ...

    def is_exhausted(self) -> bool:
        """Tell whether only blocks freed by this worker can end the lack."""
        ...

    def allocate(self, counts: Counts) -> list[list[int]]:
        """Take blocks of each group; raises OutOfBlocks, and takes none, if some are not available."""
        ...

    def free(self, block_ids: Iterable[int]) -> None:
        """Take back blocks that no launched step touches; raises KVError for a block not in use."""
        ...
