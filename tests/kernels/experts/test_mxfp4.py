"""MXFP4 in registers against its law, and the law against transformers."""

import torch
import triton
import triton.language as tl

from common.base.mxfp4 import GROUP
from common.kernels.base.expert_operands import MXFP4_SCALES
from common.kernels.experts.mxfp4 import mxfp4_factors, mxfp4_values, shifted_back
from common.ops.reference.mxfp4 import from_mxfp4 as law


@triton.jit  # type: ignore[untyped-decorator]
def _unpack(packed, scales, out, rows: tl.constexpr, columns: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.arange(0, rows)[:, None]
    column = tl.arange(0, columns)
    numbers = tl.load(packed + row * columns + column)
    dtype: tl.constexpr = out.dtype.element_ty
    factors = mxfp4_factors(tl.load(scales + row * (columns // 8) + tl.arange(0, columns // 8)), dtype)
    values = mxfp4_values(numbers, factors, dtype)
    for i in tl.static_range(4):
        value = shifted_back(values[i].to(tl.float32), dtype)
        tl.store(out + (row * columns + column) * 4 + i, value)


def test_every_value_at_every_scale(device: torch.device, dtype: torch.dtype) -> None:
    exact = {torch.float16: range(114, 141), torch.bfloat16: MXFP4_SCALES}.get(dtype, range(2, 251))
    rows, columns = 256, 32
    packed = torch.arange(256, dtype=torch.uint8).repeat(rows * columns // 256).view(rows, columns)
    scale = torch.arange(rows, dtype=torch.int32).clamp(exact[0], exact[-1]).to(torch.uint8)
    scales = scale.view(-1, 1).repeat(1, columns // 16)
    out = torch.full((rows, 2 * columns), torch.nan, device=device, dtype=dtype)
    _unpack[(1,)](packed.to(device).view(torch.uint16), scales.to(device), out, rows, columns // 2)
    assert torch.equal(out.float().cpu(), law(packed, scales)), "four bits and a power of two are exact"


def test_zeros_at_every_small_scale(device: torch.device, dtype: torch.dtype) -> None:
    rows, columns = 32, 32
    packed = torch.tensor([0x00, 0x08, 0x80, 0x88], dtype=torch.uint8).repeat(rows * columns // 4).view(rows, columns)
    scales = torch.arange(rows, dtype=torch.uint8).view(-1, 1).repeat(1, columns // 16)
    out = torch.full((rows, 2 * columns), torch.nan, device=device, dtype=dtype)
    _unpack[(1,)](packed.to(device).view(torch.uint16), scales.to(device), out, rows, columns // 2)
    assert not out.any(), "with either sign"


def test_the_law_is_transformers_s() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = torch.randint(256, (3, 10, 4, GROUP // 2), dtype=torch.uint8)
    scales = torch.randint(100, 140, (3, 10, 4), dtype=torch.uint8)
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)  # [E, in, out]
    assert torch.equal(law(blocks.flatten(-2), scales), theirs.transpose(1, 2))
