"""Room for what rows of a decode step attend to together (`shared_prefix_attention`): how much, and how much memory.

Knows no Triton, as what a step takes is reckoned where there may be none.
"""

import torch

from common.kernels.base.gpu import Gpu
from common.kernels.base.operands import SharedParts

SMALL_BUNDLE = 64  # queries: those of all query heads of a KV head
LARGE_BUNDLE = 128
MAX_SHARING_ROWS = 512
"""Of a step: each is compared with each, by a kernel that takes minutes to compile for twice as many."""
PROGRAMS_PER_SM = {SMALL_BUNDLE: 2, LARGE_BUNDLE: 1}  # by queries


def shared_slots(queries: int, gpu: Gpu) -> int:
    """Programs with bundles of so many queries that run at once."""
    return PROGRAMS_PER_SM[queries] * gpu.num_sms


def most_shared_slots(gpu: Gpu) -> int:
    """Of bundles of any size."""
    return max(shared_slots(queries, gpu) for queries in PROGRAMS_PER_SM)


def max_shared_items(num_rows: int, num_kv_heads: int, num_slots: int) -> int:
    """Of each KV head: every group has two rows or more, and every piece but one of a bundle a program's share."""
    return num_rows // 2 + num_slots // num_kv_heads  # a bundle has at least `shared_division.MIN_TOKENS`


def make_shared_parts(
    max_rows: int, num_slots: int, num_kv_heads: int, head_dim: int, device: torch.device
) -> SharedParts:
    """Room for what any division of up to `max_rows` rows leaves."""
    shape = (max_shared_items(max_rows, num_kv_heads, num_slots), num_kv_heads, LARGE_BUNDLE)
    return SharedParts(
        partial=torch.empty((*shape, head_dim), dtype=torch.float32, device=device),
        maxima=torch.empty(shape, dtype=torch.float32, device=device),
        sums=torch.empty(shape, dtype=torch.float32, device=device),
    )


def shared_parts_bytes(max_rows: int, num_slots: int, num_kv_heads: int, head_dim: int) -> int:
    """Bytes of what `make_shared_parts` makes."""
    return max_shared_items(max_rows, num_kv_heads, num_slots) * num_kv_heads * LARGE_BUNDLE * (head_dim + 2) * 4
