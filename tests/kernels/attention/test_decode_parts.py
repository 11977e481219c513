"""How parts are joined is seen in the tests of attention, by contexts cut and whole; here what that stands on."""

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from common.kernels.attention.decode_parts import (
    MAX_PARTS,
    NO_KEYS,
    RUN_PARTS,
    check_room,
    folded,
    make_workspace,
    units_at_once,
)
from common.kernels.base.attention_operands import Division


@triton.jit  # type: ignore[untyped-decorator]
def _fold_kernel(  # type: ignore[no-untyped-def]
    sums_ptr, maxima_ptr, weights_ptr, NUM_HEADS: tl.constexpr, DIM: tl.constexpr, FIRST: tl.constexpr
):
    """Fold nothing into what is there, or what is there into nothing if FIRST."""
    heads = tl.arange(0, NUM_HEADS)
    elements = heads[:, None] * DIM + tl.arange(0, DIM)[None, :]
    there = (tl.load(sums_ptr + elements), tl.load(maxima_ptr + heads), tl.load(weights_ptr + heads))
    none = (tl.zeros((NUM_HEADS, DIM), tl.float32), tl.full((NUM_HEADS,), NO_KEYS, tl.float32), heads * 0.0)
    if FIRST:
        sums, maxima, weights = folded(none, there, 1)
    else:
        sums, maxima, weights = folded(there, none, 1)
    tl.store(sums_ptr + elements, sums)
    tl.store(maxima_ptr + heads, maxima)
    tl.store(weights_ptr + heads, weights)


@pytest.mark.parametrize("first", [True, False])
def test_to_fold_nothing_changes_no_bit(first: bool, device: torch.device) -> None:
    there = [torch.randn(4, 32) * 30, torch.randn(4) * 100, torch.rand(4) * 60 + 1]
    after = [tensor.clone().to(device) for tensor in there]
    _fold_kernel[(1,)](*after, NUM_HEADS=4, DIM=32, FIRST=first)
    assert all(torch.equal(ours.cpu(), theirs) for ours, theirs in zip(after, there, strict=True))


@pytest.mark.parametrize("num_heads", [1, 4, 8, 16, 64])
@pytest.mark.parametrize("head_dim", [32, 128, 256])
def test_runs_are_whole(num_heads: int, head_dim: int) -> None:
    assert MAX_PARTS % RUN_PARTS == units_at_once(num_heads, head_dim) % RUN_PARTS == 0
    assert units_at_once(num_heads, head_dim) > 0


def division_of(max_joins: int) -> Division:
    nothing: Tensor = torch.zeros(0, 8, dtype=torch.int32)
    return Division(nothing, nothing, max_joins, num_slots=8)


def test_parts_must_fit() -> None:
    workspace = make_workspace(4, 4, 2, 64, torch.device("cpu"))
    check_room(workspace, division_of(4), 4, 2, 64)
    with pytest.raises(AssertionError, match="the workspace has room for 4"):
        check_room(workspace, division_of(5), 4, 2, 64)
    with pytest.raises(AssertionError, match="heads differ"):
        check_room(workspace, division_of(1), 8, 2, 64)
