"""Workspace for parts of contexts in attention of few queries (`few_query_attention`): number of parts, and memory.

Imports no Triton, because memory of a step is also computed where Triton may be missing.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from common.kernels.base.gpu import Gpu

TILE_ROWS = 64
"""Rows of a tile of queries, at most; a row is a query of one head."""
PROGRAMS_PER_SM = 2
"""Programs resident at once, by their shared memory on Hopper with heads of 128."""


@dataclass(frozen=True, slots=True)
class QueryParts:
    """Memory for parts to be joined; all layers share an instance, because layers run in sequence."""

    partial: Tensor  # [max_parts, num_kv_heads, TILE_ROWS, head_dim] fp32: weighted sums of values
    maxima: Tensor  # [max_parts, num_kv_heads, TILE_ROWS] fp32: maxima of scores, in units of log2
    sums: Tensor  # [max_parts, num_kv_heads, TILE_ROWS] fp32: sums of weights
    arrivals: Tensor  # [max_parts, num_kv_heads] int32, 0: programs with a stored part, at the tile's first part

    @property
    def max_parts(self) -> int:
        """Most parts, over all tiles, of contexts that are cut, for each KV head."""
        return self.sums.shape[0]


def tokens_of_tile(dtype: torch.dtype, num_q_heads: int, num_kv_heads: int) -> int:
    """Return the queries of a sequence that share a tile; 0 if a KV head has more query heads than a tile has rows."""
    rows = TILE_ROWS if dtype.itemsize == 2 else TILE_ROWS // 2
    return rows >> (num_q_heads // num_kv_heads - 1).bit_length()


def max_parts_for(num_kv_heads: int, gpu: Gpu) -> int:
    """Return the number of parts for each KV head at which all programs run at once."""
    return max(1, PROGRAMS_PER_SM * gpu.num_sms // num_kv_heads)


def make_query_parts(num_kv_heads: int, head_dim: int, gpu: Gpu, device: torch.device) -> QueryParts:
    """Allocate room for the parts left by any step."""
    heads = (max_parts_for(num_kv_heads, gpu), num_kv_heads)
    return QueryParts(
        partial=torch.empty((*heads, TILE_ROWS, head_dim), dtype=torch.float32, device=device),
        maxima=torch.empty((*heads, TILE_ROWS), dtype=torch.float32, device=device),
        sums=torch.empty((*heads, TILE_ROWS), dtype=torch.float32, device=device),
        arrivals=torch.zeros(heads, dtype=torch.int32, device=device),
    )


def query_parts_bytes(num_kv_heads: int, head_dim: int, gpu: Gpu) -> int:
    """Return the size of `make_query_parts`' result."""
    rows = max_parts_for(num_kv_heads, gpu) * num_kv_heads * TILE_ROWS
    return 4 * (rows * (head_dim + 2) + rows // TILE_ROWS)
