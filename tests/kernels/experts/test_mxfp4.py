"""MXFP4 in registers against its law, and the law against transformers."""

import torch
import triton
import triton.language as tl

from common.base.mxfp4 import GROUP
from common.kernels.base.expert_operands import ExpertMatrix
from common.kernels.experts.mxfp4 import from_mxfp4
from common.kernels.experts.unpacking import unpacked
from common.ops.reference.mxfp4 import from_mxfp4 as law


@triton.jit  # type: ignore[untyped-decorator]
def _unpack(packed, scales, out, rows: tl.constexpr, columns: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.arange(0, rows)[:, None]
    codes = tl.load(packed + row * columns + tl.arange(0, columns))
    factors = tl.load(scales + row * (columns // 16) + tl.arange(0, columns // 16))
    values = from_mxfp4(codes, factors, out.dtype.element_ty)
    tl.store(out + row * 2 * columns + tl.arange(0, 2 * columns), values)


def test_every_value_at_every_scale(device: torch.device, dtype: torch.dtype) -> None:
    least, most = (114, 140) if dtype == torch.float16 else (2, 250)  # within the range of the values' type
    rows, columns = 256, 32
    packed = torch.arange(256, dtype=torch.uint8).repeat(rows * columns // 256).view(rows, columns)
    scales = (
        torch.arange(rows, dtype=torch.int32).clamp(least, most).to(torch.uint8).view(-1, 1).repeat(1, columns // 16)
    )
    out = torch.full((rows, 2 * columns), torch.nan, device=device, dtype=dtype)
    _unpack[(1,)](packed.to(device), scales.to(device), out, rows, columns)
    assert torch.equal(out.float().cpu(), law(packed, scales)), "four bits and a power of two are exact"


def test_the_law_is_transformers_s() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = torch.randint(256, (3, 10, 4, GROUP // 2), dtype=torch.uint8)
    scales = torch.randint(100, 140, (3, 10, 4), dtype=torch.uint8)
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)  # [E, in, out]
    assert torch.equal(law(blocks.flatten(-2), scales), theirs.transpose(1, 2))


def test_whole_matrices_are_unpacked(device: torch.device, dtype: torch.dtype) -> None:
    data = torch.randint(256, (3, 7, 160), dtype=torch.uint8)
    scales = torch.randint(118, 124, (3, 7, 10), dtype=torch.uint8)
    matrix = ExpertMatrix(data.to(device), scales.to(device), torch.ones(3, 7))
    found = unpacked(matrix, dtype)
    assert found.scales is None and found.bias is matrix.bias
    assert torch.equal(found.data.float().cpu(), law(data, scales)), "exact in all dtypes at such scales"
