"""Codes of 8 bits: e4m3 (a sign, 4 bits of exponent, 3 of mantissa; 448 at most) and signed bytes.

e4m3 is rounded and widened by instructions from compute capability 8.9 on, and else by integer arithmetic, exactly as
torch does. So a matrix of e4m3 is handed to kernels as bytes where there are no instructions.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.kernels.base.expert_operands import GROUP as GROUP
from common.kernels.base.gpu import gpu_of

LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
"""Largest codes, by their dtype."""
LEAST_MAGNITUDE = tl.constexpr(1e-12)  # taken for the largest magnitude of zeros


@triton.jit
def scale_of(magnitude, LARGEST: tl.constexpr):
    """Return the scale of numbers whose largest magnitude is given."""
    return tl.div_rn(tl.maximum(magnitude, LEAST_MAGNITUDE), LARGEST + tl.zeros_like(magnitude))


@triton.jit
def codes_of(x, scale, LARGEST: tl.constexpr, NATIVE: tl.constexpr):
    """Return codes of fp32 numbers, nearest to `x / scale`: uint8 of e4m3 if LARGEST is 448, else int8.

    NATIVE: e4m3 by the GPU's instruction, and a quotient by its inverse with a correction, which rounds alike.
    """
    if NATIVE:
        inverse = tl.div_rn(tl.zeros_like(scale) + 1.0, scale)
        estimate = x * inverse
        exact = tl.fma(tl.fma(-estimate, tl.zeros_like(x) + scale, x), tl.zeros_like(x) + inverse, estimate)
    else:
        exact = tl.div_rn(x, scale + tl.zeros_like(x))
    exact = tl.minimum(tl.maximum(exact, -LARGEST), LARGEST)
    if LARGEST == 448.0:
        code = exact.to(tl.float8e4nv).to(tl.uint8, bitcast=True) if NATIVE else _e4m3_of(exact)
    else:
        code = ((exact + 12582912.0) - 12582912.0).to(tl.int8)  # 1.5 * 2 ** 23: the sum has no bits below 1
    return code


@triton.jit
def _e4m3_of(exact):
    """Return e4m3 bytes nearest to numbers of at most 448, by integer arithmetic."""
    bits = exact.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - 960
    small = (tl.abs(exact) + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000  # in units of the least code, 2 ** -9
    return (((bits >> 24) & 0x80) | tl.where(tl.abs(exact) < 0.015625, small, normal)).to(tl.uint8)


@triton.jit
def e4m3_halves(codes):
    """Return numbers of e4m3 bytes, divided by 256, in fp16: exactly."""
    wide = codes.to(tl.uint16)
    return (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)


@triton.jit
def widened(codes):
    """Return codes as fp32, exactly; uint8 is taken for e4m3."""
    return e4m3_halves(codes).to(tl.float32) * 256.0 if codes.dtype == tl.uint8 else codes.to(tl.float32)


@triton.jit
def elements_of(codes, dtype: tl.constexpr):
    """Return codes in a dtype of 16 bits, or fp32, exactly; uint8 is taken for e4m3, which goes through fp16."""
    if codes.dtype == tl.uint8:
        halves = e4m3_halves(codes)
        numbers = (halves * 256.0).to(dtype) if dtype == tl.float16 else (halves.to(tl.float32) * 256.0).to(dtype)
    elif codes.dtype == tl.float8e4nv:
        numbers = codes.to(tl.float16).to(dtype)
    else:
        numbers = codes.to(dtype)
    return numbers


def is_native(device: torch.device) -> bool:
    """Tell whether kernels on a device convert to e4m3 by instruction."""
    return device.type != "cpu" and gpu_of(device).has_e4m3


def readable(codes: Tensor, *, has_e4m3: bool) -> Tensor:
    """Return codes as a kernel may read them: e4m3 as bytes where the GPU has no instruction for it."""
    return codes if has_e4m3 or codes.dtype != torch.float8_e4m3fn else codes.view(torch.uint8)


def check_scales(x_scales: Tensor | None, weight: Tensor, scales: Tensor) -> tuple[bool, int]:
    """Require scales of rows, or of groups of columns for one row or GROUP rows, and tokens' scales to match.

    Return whether scales are of groups, and the rows that share one.
    """
    n, k = weight.shape
    num_groups, num_blocks = -(-k // GROUP), -(-n // GROUP)
    assert scales.dtype == torch.float32 and scales.is_contiguous(), f"scales of {scales.dtype}: contiguous fp32 needed"
    shapes = ((n, 1), (n, num_groups), (num_blocks, num_groups))
    assert scales.shape in shapes, f"scales {tuple(scales.shape)}: one of {shapes} needed"
    if x_scales is not None:
        assert x_scales.dtype == torch.float32 and x_scales.t().is_contiguous(), "scales of tokens: fp32, by column"
        assert x_scales.shape[1] == scales.shape[1], f"groups of tokens {x_scales.shape[1]}, of rows {scales.shape[1]}"
    is_grouped = scales.shape != (n, 1)
    return is_grouped, 1 if scales.shape[0] == n else GROUP
