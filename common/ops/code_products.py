"""Products of many tokens in codes of 8 bits; scales are applied by a library, or by kernels of ours.

On Hopper a kernel of ours multiplies INT8 with scales of rows, and FP8 before a gate or in parts. Elsewhere a library
multiplies FP8 where the GPU can, and INT8 gives sums of 32 bits. Other codes are widened to 16 bits, which holds them
exactly, and sums are fp32. So each way computes the law.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from common.kernels.base.codes import GROUP
from common.kernels.base.gpu import Gpu
from common.kernels.elementwise.gate_mul import gate_mul
from common.kernels.elementwise.scale_sums import scale_sums
from common.kernels.products.quantized_gemm import num_splits, quantized_gemm, quantized_gemm_parts
from common.ops import reference
from common.ops.base import Scheme, Weight

FEW_TOKENS = 32
"""Left to libraries by our kernel; `torch._int_mm` refuses up to 16, so as few are padded to this number."""

WIDENED_ELEMENTS = 8 * 1024 * 1024
"""Of a matrix in fp32 at once, of which a few copies are held."""


class Codes(NamedTuple):
    """Quantized activations."""

    data: Tensor  # [num_tokens, k]
    scales: Tensor  # fp32 [num_tokens, groups], with contiguous columns


def multiply(x: Codes, weight: Weight, gpu: Gpu, activation: str | None = None) -> Tensor:
    """Return `x @ weight.T + bias`, or `activation(gate) * up` of a matrix of both: `[num_tokens, n]`."""
    assert weight.scales is not None, "a matrix of codes"
    if _has_own_product(x, weight, gpu, is_small=False, is_gated=activation is not None):
        y = quantized_gemm(x.data, x.scales, weight.data, weight.scales, weight.dtype, activation=activation)
        return y if weight.bias is None else y.add_(weight.bias)
    if weight.is_grouped or _has_row_product(weight, gpu):
        y = _product(x, weight, weight.scales, gpu)
        return y if activation is None else gate_mul(y, activation)
    n = weight.num_out // (1 if activation is None else 2)
    out = torch.empty((x.data.shape[0], n), dtype=weight.dtype, device=x.data.device)
    sums = _int_sums(x.data, weight.data) if weight.scheme is Scheme.INT8 else _wide_sums(x.data, weight.data)
    return scale_sums(sums, x.scales, weight.scales, out, bias=weight.bias, activation=activation)


def multiply_in_parts(x: Codes, weight: Weight, gpu: Gpu) -> Tensor:
    """Return `x @ weight.T + bias` in parts that are to be added: `[splits, num_tokens, n]`."""
    splits = num_splits(x.data.shape[0], weight.num_out, weight.num_in, gpu.num_sms)
    if splits == 1 or not _has_own_product(x, weight, gpu, is_small=True):
        return multiply(x, weight, gpu)[None]
    assert weight.scales is not None, "a matrix of codes"
    parts = quantized_gemm_parts(x.data, x.scales, weight.data, weight.scales, splits)
    if weight.bias is not None:
        parts[0] += weight.bias
    return parts


def _product(x: Codes, weight: Weight, scales: Tensor, gpu: Gpu) -> Tensor:
    """Return `x @ weight.T + bias` of e4m3, or of scales of groups: `[num_tokens, n]`."""
    if _has_row_product(weight, gpu):
        options: Any = {"scale_a": x.scales, "scale_b": scales.t(), "out_dtype": weight.dtype, "use_fast_accum": True}
        y = torch._scaled_mm(x.data, weight.data.t(), **options)
    elif _has_block_product(weight, gpu):
        y = _block_product(x, weight.data, scales, weight.dtype)
    else:
        tokens = _widened(Weight(x.data, None, x.scales.contiguous()), weight.dtype)
        y = functional.linear(tokens, _widened(weight, weight.dtype))
    return y if weight.bias is None else y.add_(weight.bias)


def _widened(weight: Weight, dtype: torch.dtype) -> Tensor:
    """Return the elements of a matrix in 16 bits, rounded once; few rows at a time are held in fp32."""
    assert weight.scales is not None, "a matrix of codes"
    out = torch.empty(weight.data.shape, dtype=dtype, device=weight.data.device)
    each, most = weight.scale_rows, max(WIDENED_ELEMENTS // weight.num_in // GROUP, 1) * GROUP
    for begin in range(0, weight.num_out, most):
        scales = weight.scales[begin // each : -(-(begin + most) // each)]
        some = reference.dequantized(Weight(weight.data[begin : begin + most], None, scales))
        out[begin : begin + most].copy_(some)
    return out


def _has_row_product(weight: Weight, gpu: Gpu) -> bool:
    """Tell whether a library multiplies e4m3 and applies scales of tokens and rows."""
    is_even = weight.num_out % 16 == weight.num_in % 16 == 0
    is_of_rows = weight.scheme is Scheme.FP8 and not weight.is_grouped
    return is_of_rows and gpu.has_e4m3 and is_even and weight.dtype is torch.bfloat16


def _has_own_product(x: Codes, weight: Weight, gpu: Gpu, *, is_small: bool, is_gated: bool = False) -> bool:
    """Tell whether a kernel of ours multiplies codes and applies scales of tokens and rows.

    A library is as fast with e4m3, but for small products in parts, and for a gate, which would read gate and up again.
    """
    is_even = weight.num_out % 16 == weight.num_in % 16 == 0
    is_wanted = weight.scheme is Scheme.INT8 or (weight.scheme is Scheme.FP8 and (is_small or is_gated))
    is_of_rows = is_wanted and not weight.is_grouped
    return is_of_rows and gpu.is_hopper and is_even and weight.dtype.itemsize == 2 and x.data.shape[0] > FEW_TOKENS


def _int_sums(x: Tensor, weight: Tensor) -> Tensor:
    """Return sums of products of signed bytes: int32 `[num_tokens, n]`."""
    num_tokens, (n, k) = x.shape[0], weight.shape
    if n % 8 or k % 8:
        return _wide_sums(x, weight)
    padding = max(0, FEW_TOKENS - num_tokens)
    x = functional.pad(x, (0, 0, 0, padding)) if padding else x
    return torch._int_mm(x, weight.t())[:num_tokens]


def _wide_sums(x: Tensor, weight: Tensor) -> Tensor:
    """Return sums of products of codes in fp32: `[num_tokens, n]`."""
    return torch.mm(x.bfloat16(), weight.bfloat16().t(), out_dtype=torch.float32)


def _has_block_product(weight: Weight, gpu: Gpu) -> bool:
    """Tell whether cuBLASLt multiplies e4m3 with scales of 128 x 128: Hopper only, and groups in fours."""
    is_even = weight.num_out % 16 == weight.num_in % (4 * GROUP) == 0
    is_block = weight.scheme is Scheme.FP8 and weight.scale_rows == GROUP
    return is_block and gpu.is_hopper and is_even and weight.dtype is torch.bfloat16


def _block_product(x: Codes, weight: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the product of e4m3 with scales of groups; tokens are padded to fours."""
    num_tokens = x.data.shape[0]
    padding = -num_tokens % 4
    data, x_scales = x.data, x.scales
    if padding:
        data = functional.pad(data.view(torch.uint8), (0, 0, 0, padding)).view(data.dtype)
        x_scales = functional.pad(x_scales.t(), (0, padding)).t()
    y = functional.scaled_mm(
        data,
        weight.t(),
        x_scales,
        functional.ScalingType.BlockWise1x128,
        scales.t(),
        functional.ScalingType.BlockWise128x128,
        output_dtype=dtype,
    )
    return y[:num_tokens]
