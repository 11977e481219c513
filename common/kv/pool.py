"""Memory of KV blocks, shaped by groups. Knows bytes, not owners (see `blocks`)."""

from contextlib import nullcontext

import torch
from torch import Tensor

from common.base.dtypes import DTYPES
from common.wire.values.pool_shape import PoolShape


class KVPool:
    """Blocks over `memory [num_bytes]` uint8; views of all groups span the whole memory."""

    def __init__(self, shape: PoolShape, memory: Tensor) -> None:
        self.shape, self.layout, self.memory = shape, shape.layout, memory
        self.blocks: list[Tensor] = []  # of each group `[num_ids, block_bytes]` uint8
        self.caches: list[Tensor] = []  # of each group `[num_ids, *block_shape]`
        for group in shape.layout.groups:
            count = shape.num_bytes // group.block_bytes
            used = memory[: count * group.block_bytes]
            self.blocks.append(used.view(count, group.block_bytes))
            self.caches.append(used.view(DTYPES[group.dtype]).view(count, *group.block_shape))

    def block(self, block_id: int) -> Tensor:
        """Return the memory of a block: `[block_bytes]` uint8."""
        number = self.shape.group_of(block_id)
        return self.blocks[number][block_id - self.shape.begins[number]]

    def copy(self, source_id: int, target_id: int) -> None:
        """Copy a block to another of the same group, on the current stream."""
        self.block(target_id).copy_(self.block(source_id), non_blocking=True)

    def read_block(self, block_id: int) -> bytes:
        """Return the bytes of a block, on the host.

        Writes of the block must be over. Does not wait for other work.
        """
        block = self.block(block_id)
        with torch.cuda.stream(torch.cuda.Stream(block.device)) if block.is_cuda else nullcontext():
            return bytes(block.cpu().numpy())
