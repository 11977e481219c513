"""Workspace for attention to prefixes shared by decode rows (`shared_prefix_attention`): number of items, and memory.

Imports no Triton, because memory of a step is also computed where Triton may be missing.
"""

import torch

from common.kernels.base.attention_operands import SharedParts
from common.kernels.base.gpu import Gpu

SMALL_BUNDLE = 64  # queries of a bundle: of all query heads of a KV head
LARGE_BUNDLE = 128
MAX_SHARING_ROWS = 512
"""Rows of a step, at most: every pair is compared, and twice as many rows take minutes to compile."""
MAX_SHARED_DIM = 128
"""Elements of a head, at most: the tiles of larger heads do not fit beside 128 queries."""
PROGRAMS_PER_SM = {SMALL_BUNDLE: 2, LARGE_BUNDLE: 1}  # by queries of a bundle


def shared_slots(queries: int, gpu: Gpu) -> int:
    """Return the number of programs, with bundles of `queries` queries, that run at once."""
    return PROGRAMS_PER_SM[queries] * gpu.num_sms


def most_shared_slots(gpu: Gpu) -> int:
    """Return the most programs, with bundles of any size, that run at once."""
    return max(shared_slots(queries, gpu) for queries in PROGRAMS_PER_SM)


def max_shared_items(num_rows: int, num_kv_heads: int, num_slots: int) -> int:
    """Return the most items for each KV head.

    Every group has at least two rows. Every piece of a bundle but one is a program's share.
    """
    return num_rows // 2 + num_slots // num_kv_heads  # a bundle has at least `shared_division.MIN_TOKENS`


def make_shared_parts(
    max_rows: int, num_slots: int, num_kv_heads: int, head_dim: int, device: torch.device
) -> SharedParts:
    """Allocate room for the results of any division of up to `max_rows` rows."""
    shape = (max_shared_items(max_rows, num_kv_heads, num_slots), num_kv_heads, LARGE_BUNDLE)
    return SharedParts(
        partial=torch.empty((*shape, head_dim), dtype=torch.float32, device=device),
        maxima=torch.empty(shape, dtype=torch.float32, device=device),
        sums=torch.empty(shape, dtype=torch.float32, device=device),
    )


def shared_parts_bytes(max_rows: int, num_slots: int, num_kv_heads: int, head_dim: int) -> int:
    """Return the size of `make_shared_parts`' result."""
    return max_shared_items(max_rows, num_kv_heads, num_slots) * num_kv_heads * LARGE_BUNDLE * (head_dim + 2) * 4
