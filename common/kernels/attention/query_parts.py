"""Room for the parts of contexts that few queries attend to (`few_query_attention`): how many, and how much memory.

Knows no Triton, as what a step takes is reckoned where there may be none.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from common.kernels.base.gpu import Gpu

TILE_ROWS = 64
"""Rows of a tile of queries at most: a row is one query of one head."""
PROGRAMS_PER_SM = 2
"""As many are resident at once, by their shared memory on Hopper with heads of 128."""


@dataclass(frozen=True, slots=True)
class QueryParts:
    """Where programs leave parts that are to be joined; one is enough for all layers, which run one after another."""

    partial: Tensor  # [max_parts, num_kv_heads, TILE_ROWS, head_dim] fp32: weighted sums of values
    maxima: Tensor  # [max_parts, num_kv_heads, TILE_ROWS] fp32: of scores, in units of log2
    sums: Tensor  # the same shape: of weights
    arrivals: Tensor  # [max_parts, num_kv_heads] int32, 0: programs that have stored theirs, at a tile's first part

    @property
    def max_parts(self) -> int:
        """Parts of all tiles together that contexts may be cut into, for each KV head."""
        return self.sums.shape[0]


def tokens_of_tile(dtype: torch.dtype, num_q_heads: int, num_kv_heads: int) -> int:
    """Queries of a sequence that share a tile; 0 where a KV head has more query heads than a tile has rows."""
    rows = TILE_ROWS if dtype.itemsize == 2 else TILE_ROWS // 2
    return rows >> (num_q_heads // num_kv_heads - 1).bit_length()


def max_parts_for(num_kv_heads: int, gpu: Gpu) -> int:
    """Parts of which each KV head has one, all computed at once."""
    return max(1, PROGRAMS_PER_SM * gpu.num_sms // num_kv_heads)


def make_query_parts(num_kv_heads: int, head_dim: int, gpu: Gpu, device: torch.device) -> QueryParts:
    """Room for what any one step leaves."""
    heads = (max_parts_for(num_kv_heads, gpu), num_kv_heads)
    return QueryParts(
        partial=torch.empty((*heads, TILE_ROWS, head_dim), dtype=torch.float32, device=device),
        maxima=torch.empty((*heads, TILE_ROWS), dtype=torch.float32, device=device),
        sums=torch.empty((*heads, TILE_ROWS), dtype=torch.float32, device=device),
        arrivals=torch.zeros(heads, dtype=torch.int32, device=device),
    )


def query_parts_bytes(num_kv_heads: int, head_dim: int, gpu: Gpu) -> int:
    """Bytes of what `make_query_parts` makes."""
    rows = max_parts_for(num_kv_heads, gpu) * num_kv_heads * TILE_ROWS
    return 4 * (rows * (head_dim + 2) + rows // TILE_ROWS)
