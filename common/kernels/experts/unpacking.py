"""Matrices in MXFP4 as matrices of 16 or 32 bits, for so many tokens that every tile would be unpacked many times."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.kernels.base.expert_operands import ExpertMatrix
from common.kernels.experts.mxfp4 import from_mxfp4

ROWS, BYTES = 16, 128  # of a program


@triton.jit
def _unpack_kernel(
    data_ptr,  # [num_rows, K / 2] uint8
    scales_ptr,  # [num_rows, K / 32] uint8
    out_ptr,  # [num_rows, K]
    num_rows,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BYTES: tl.constexpr,
):
    """Grid: (cdiv(num_rows, ROWS), cdiv(K / 2, BYTES))."""
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    inside = rows < num_rows
    rows = rows.to(tl.int64)
    columns = (tl.program_id(1) * BYTES + tl.arange(0, BYTES))[None, :]
    groups = (tl.program_id(1) * (BYTES // 16) + tl.arange(0, BYTES // 16))[None, :]
    values = (tl.program_id(1) * 2 * BYTES + tl.arange(0, 2 * BYTES))[None, :]
    packed = tl.load(data_ptr + rows * (K // 2) + columns, mask=inside & (columns < K // 2), other=0)
    scales = tl.load(scales_ptr + rows * (K // 32) + groups, mask=inside & (groups < K // 32), other=0)
    unpacked = from_mxfp4(packed, scales, out_ptr.dtype.element_ty)
    tl.store(out_ptr + rows * K + values, unpacked, mask=inside & (values < K))


def unpacked(matrix: ExpertMatrix, dtype: torch.dtype) -> ExpertMatrix:
    """Return the matrix with its values in `dtype`, in memory of its own."""
    data, scales, bias = matrix
    assert scales is not None and data.is_contiguous() and scales.is_contiguous(), "matrix in MXFP4, contiguous"
    num, n, k = data.shape[0], matrix.num_out, matrix.num_in
    out: Tensor = torch.empty((num, n, k), dtype=dtype, device=data.device)
    _unpack_kernel[(triton.cdiv(num * n, ROWS), triton.cdiv(k // 2, BYTES))](
        data_ptr=data,
        scales_ptr=scales,
        out_ptr=out,
        num_rows=num * n,
        K=k,
        ROWS=ROWS,
        BYTES=BYTES,
        num_warps=4,
    )
    return ExpertMatrix(out, None, bias)
