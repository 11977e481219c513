"""Checks of operands of products of codes alone: matrices of packed codes of 4 or 8 bits, and their neighbours.

Codes of 4 bits whose scales are bytes are e2m1, as `common.ops.base.floats` has them.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from common.kernels.base.checks import check_ending

ROW_BYTES = 64  # of a block of a row, in which codes are packed
NAMES = {torch.bfloat16: "bf16", torch.float16: "f16"}  # of activations, in instructions
FLOAT_GROUP = 16  # columns of e2m1 that share a scale


class Packed(NamedTuple):
    """Layout of a matrix of codes."""

    bits: int
    num_columns: int
    group: int  # columns that share a scale
    is_float: bool = False  # codes are e2m1

    @property
    def block(self) -> int:
        """Return the columns in ROW_BYTES of a row."""
        return ROW_BYTES * 8 // self.bits

    @property
    def least_group(self) -> int:
        """Return the columns of a word, which share a scale."""
        return self.block // 4

    @property
    def group_of_number(self) -> int:
        """Return the columns to which a number of scales belongs as kernels load it: of e2m1 two groups."""
        return 2 * self.group if self.is_float else self.group


def check_packed(weight: Tensor, scales: Tensor, offsets: Tensor | None, factors: Tensor | None) -> Packed:
    """Require a matrix of codes in whole blocks, its scales of groups of columns, and offsets alike if any.

    Of e2m1 factors of rows, and no offsets.
    """
    assert weight.dtype in (torch.uint8, torch.int8), f"weight of {weight.dtype}: packed or signed bytes needed"
    assert weight.is_contiguous() and scales.is_contiguous(), "codes and scales: contiguous needed"
    bits, (n, width) = 4 if weight.dtype == torch.uint8 else 8, weight.shape
    k = width * 8 // bits
    found = Packed(bits, k, k // scales.shape[1], scales.dtype == torch.uint8)
    assert width % ROW_BYTES == 0, f"weight {tuple(weight.shape)}: rows by {ROW_BYTES} bytes needed"
    assert scales.shape[0] == n and found.group * scales.shape[1] == k, (
        f"scales {tuple(scales.shape)}: for {n} rows of {k} columns needed"
    )
    if found.is_float:
        assert bits == 4 and found.group == FLOAT_GROUP, f"{bits} bits, groups of {found.group}: no e2m1 in 16s"
        assert factors is not None and factors.shape == (n, 1) and factors.dtype == torch.float32, (
            f"factors of e2m1: fp32, [{n}, 1] needed"
        )
        assert factors.is_contiguous() and offsets is None, "factors: contiguous; no offsets"
        return found
    assert factors is None and scales.dtype in (torch.float16, torch.float32), (
        f"scales of {scales.dtype}: fp16 or fp32, without factors, needed"
    )
    narrow = found.least_group, 2 * found.least_group
    assert found.group in narrow or found.group % found.block == 0, (
        f"groups of {found.group} columns: {narrow} or multiples of {found.block} needed"
    )
    assert offsets is None or (offsets.shape == scales.shape and offsets.dtype == scales.dtype), "offsets unlike scales"
    assert offsets is None or offsets.is_contiguous(), "offsets: contiguous needed"
    return found


def check_packed_product(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    offsets: Tensor | None,
    factors: Tensor | None,
    out: Tensor,
    *,
    splits: int,
    norm: Tensor | None,
    residual: Tensor | None,
    bias: Tensor | None,
    activation: str | None,
) -> Packed:
    """Require operands as `packed_ring` and `packed_gemm` take them."""
    packed, (m, k) = check_packed(weight, scales, offsets, factors), x.shape
    n = weight.shape[0] // (2 if activation else 1)
    assert x.dtype in NAMES, f"x of {x.dtype}: 16 bits needed"
    assert x.is_contiguous() and packed.num_columns == k, f"x {tuple(x.shape)}, {packed.num_columns} columns: alike"
    shape = (splits, m, n) if splits > 1 else (m, n)
    assert out.shape == shape and out.is_contiguous(), f"out {tuple(out.shape)}: contiguous {shape} needed"
    assert splits == 1 or (residual is None and activation is None), f"{splits} splits: parts are sums alone"
    assert norm is None or (norm.shape == (k,) and m == splits == 1), (
        f"{m} tokens, {splits} splits: norms of one, [{k}]"
    )
    assert residual is None or residual.shape == (m, n), f"residual {tuple(residual.shape)}: ({m}, {n}) needed"
    check_ending(n, bias, activation)
    return packed
