"""Codes of matrices whose activations are not quantized, in registers, as numbers of the activations' type.

The lowest bits of 128 in bfloat16, or of 1,024 in fp16, are a code that is added to the power of two. One instruction
sets them for two codes, another subtracts.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

# Two numbers of two signed codes become two pairs. In bfloat16 7 bits are added to 128, and the sign to 128 as 128; the
# difference is the code. In fp16 the code plus 128 is added to 1,024, and 1,152 subtracted.
_BF16_BYTES = tl.constexpr(
    """{
    .reg .b32 part, sign, other, minus;
    mov.b32 minus, 0xBF80BF80;
    lop3.b32 part, $2, 0x007F007F, 0x43004300, 0xEA;
    lop3.b32 sign, $2, 0x00800080, 0x43004300, 0xEA;
    fma.rn.bf16x2 $0, sign, minus, part;
    shr.u32 other, $2, 8;
    lop3.b32 part, other, 0x007F007F, 0x43004300, 0xEA;
    lop3.b32 sign, other, 0x00800080, 0x43004300, 0xEA;
    fma.rn.bf16x2 $1, sign, minus, part;
    }"""
)
_FP16_BYTES = tl.constexpr(
    """{
    .reg .b32 part, plus, one, less;
    mov.b32 one, 0x3C003C00;
    mov.b32 less, 0xE480E480;
    xor.b32 plus, $2, 0x80808080;
    lop3.b32 part, plus, 0x00FF00FF, 0x64006400, 0xEA;
    fma.rn.f16x2 $0, part, one, less;
    shr.u32 plus, plus, 8;
    lop3.b32 part, plus, 0x00FF00FF, 0x64006400, 0xEA;
    fma.rn.f16x2 $1, part, one, less;
    }"""
)


@triton.jit
def bytes_of_numbers(numbers, dtype: tl.constexpr):
    """Return the first and the second signed code of a tile of numbers of 16 bits, exactly in `dtype`."""
    if dtype == tl.float32:
        a = (numbers & 255).to(tl.uint8).to(tl.int8, bitcast=True).to(tl.float32)
        b = (numbers >> 8).to(tl.uint8).to(tl.int8, bitcast=True).to(tl.float32)
    elif dtype == tl.bfloat16:
        a, b = tl.inline_asm_elementwise(
            _BF16_BYTES, "=r,=r,r", [numbers], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )
    else:
        a, b = tl.inline_asm_elementwise(
            _FP16_BYTES, "=r,=r,r", [numbers], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    return a, b


class Layout(NamedTuple):
    """Layout of a matrix of codes."""

    num_columns: int
    is_packed: bool  # codes of 4 bits
    block: int  # columns in 64 bytes of a row
    group: int  # columns that share a scale


def check_codes_alone(weight: Tensor, scales: Tensor, offsets: Tensor | None) -> Layout:
    """Require a matrix of codes in blocks of 64 bytes, its scales of groups of columns, and offsets alike if any."""
    is_packed = weight.dtype == torch.uint8
    (n, width), k = weight.shape, weight.shape[1] * (2 if is_packed else 1)
    block = 128 if is_packed else 64
    narrow, group = (32, 64) if is_packed else (16, 32), k // scales.shape[1]
    assert is_packed or weight.dtype == torch.int8, f"weight of {weight.dtype}: packed or signed bytes needed"
    assert weight.is_contiguous() and width % 64 == 0, f"weight {tuple(weight.shape)}: contiguous, by 64 bytes, needed"
    assert scales.dtype in (torch.float16, torch.float32), f"scales of {scales.dtype}: fp16 or fp32 needed"
    assert scales.shape[0] == n and group * scales.shape[1] == k and scales.is_contiguous(), (
        f"scales {tuple(scales.shape)}: contiguous, for {n} rows of {k} columns, needed"
    )
    assert group in narrow or group % block == 0, f"groups of {group} columns: {narrow} or multiples of {block} needed"
    assert offsets is None or (offsets.shape == scales.shape and offsets.dtype == scales.dtype), "offsets unlike scales"
    assert offsets is None or offsets.is_contiguous(), "offsets: contiguous needed"
    return Layout(k, is_packed, block, group)
