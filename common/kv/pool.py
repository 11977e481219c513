"""The memory of KV blocks, shaped by a layout. Knows bytes, not who owns them (see `blocks`)."""

from contextlib import nullcontext
from typing import Protocol

import torch
from torch import Tensor

from common.dtypes import DTYPES
from common.wire.kv_layout import KVLayout


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
    """`num_blocks` blocks over memory that peers can map.

    Args:
        pool_id: names this very memory.
    """

    def __init__(self, layout: KVLayout, memory: PoolMemory, pool_id: int = 0) -> None:
        self.layout, self.pool_id = layout, pool_id
        self.memory = memory
        self.num_blocks = memory.tensor.numel() // layout.block_bytes
        used = memory.tensor[: self.num_blocks * layout.block_bytes]
        self.blocks: Tensor = used.view(self.num_blocks, layout.block_bytes)  # [num_blocks, block_bytes] uint8
        self.cache: Tensor = used.view(DTYPES[layout.dtype]).view(self.num_blocks, *layout.block_shape)

    def write_block(self, block_id: int, data: bytearray) -> None:
        """Overwrite one block with `block_bytes` bytes from the host."""
        self.blocks[block_id].copy_(torch.frombuffer(data, dtype=torch.uint8))

    def read_block(self, block_id: int) -> bytes:
        """The bytes of one block, on the host; what wrote them must be over, and nothing else is waited for."""
        is_cuda = self.blocks.device.type == "cuda"
        with torch.cuda.stream(torch.cuda.Stream(self.blocks.device)) if is_cuda else nullcontext():
            return bytes(self.blocks[block_id].cpu().numpy())

    def close(self) -> None:
        """Give the memory back; no view of it may be used afterwards."""
        self.memory.close()
