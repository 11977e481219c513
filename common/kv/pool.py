"""The memory of KV blocks, shaped by groups. Knows bytes, not who owns them (see `blocks`)."""

from contextlib import nullcontext
from typing import Protocol

import torch
from torch import Tensor

from common.dtypes import DTYPES
from common.wire.pool_shape import PoolShape


class PoolMemory(Protocol):
    """Memory that a peer can map."""

    tensor: Tensor  # [num_bytes] uint8

    def handle(self) -> bytes:
        """What a peer needs to map it."""
        ...

    def close(self) -> None:
        """Free it; peers must have closed their mapping or never use it again."""
        ...


class KVPool:
    """Blocks over memory that peers can map.

    Args:
        pool_id: names this very memory.
    """

    def __init__(self, shape: PoolShape, memory: PoolMemory, pool_id: int = 0) -> None:
        self.shape, self.layout, self.pool_id = shape, shape.layout, pool_id
        self.memory = memory
        self.blocks: list[Tensor] = []  # of each group `[num_blocks, block_bytes]` uint8
        self.caches: list[Tensor] = []  # of each group `[num_blocks, *block_shape]`
        for group, count, offset in zip(shape.layout.groups, shape.num_blocks, shape.offsets, strict=False):
            used = memory.tensor[offset : offset + count * group.block_bytes]
            self.blocks.append(used.view(count, group.block_bytes))
            self.caches.append(used.view(DTYPES[group.dtype]).view(count, *group.block_shape))

    def block(self, block_id: int) -> Tensor:
        """`[block_bytes]` uint8."""
        number = self.shape.group_of(block_id)
        return self.blocks[number][block_id - self.shape.proof_ids[number]]

    def write_block(self, block_id: int, data: bytearray) -> None:
        """Overwrite one block with as many bytes from the host."""
        self.block(block_id).copy_(torch.frombuffer(data, dtype=torch.uint8))

    def read_block(self, block_id: int) -> bytes:
        """The bytes of one block, on the host; what wrote them must be over, and nothing else is waited for."""
        block = self.block(block_id)
        with torch.cuda.stream(torch.cuda.Stream(block.device)) if block.is_cuda else nullcontext():
            return bytes(block.cpu().numpy())

    def close(self) -> None:
        """Give the memory back; no view of it may be used afterwards."""
        self.memory.close()
