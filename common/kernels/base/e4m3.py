"""Numbers of an e4m3 cache in kernels: from fp32 to a byte, and from a byte to a type that is multiplied.

Every e4m3 number is a float16 number. So keys and values of such a cache are multiplied in float16, also for a bfloat16
model: the conversion is an instruction for two numbers. GPUs before 8.9 have no such instruction; there, and in
Triton's interpreter, the cache is passed as bytes, whose bits are moved.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.kernels.base.attention_operands import E4M3_TYPES
from common.kernels.base.gpu import Gpu

E4M3_MAX = tl.constexpr(448.0)
FLOAT16_MAX = tl.constexpr(65504.0)


def as_operand(cache: Tensor, gpu: Gpu) -> Tensor:
    """Return a cache as kernels take it on `gpu`."""
    has_instructions = gpu.capability >= (8, 9)
    return cache if has_instructions or cache.dtype != torch.float8_e4m3fn else cache.view(torch.uint8)


def is_e4m3(cache: Tensor) -> bool:
    """Tell whether a cache, as kernels take it, has e4m3 numbers."""
    return cache.dtype in E4M3_TYPES


@triton.jit
def widened(x, dtype: tl.constexpr):
    """Return loaded keys or values in `dtype`, exactly, if they are e4m3 numbers; else as they are.

    Callable from Gluon, like all jit functions of this file.
    """
    if x.dtype == tl.uint8:
        extended = x.to(tl.int8, bitcast=True).to(tl.int16)
        half = (extended << 7) & -0x4080  # sign, exponent and mantissa of 2 ** -8 of the number
        number = half.to(tl.float16, bitcast=True) * 256.0
        x = tl.where((extended & 0x7F) == 0x7F, float("nan"), number).to(dtype)
    elif x.dtype == tl.float8e4nv:
        x = x.to(tl.float16).to(dtype)
    return x


@triton.jit
def in_fp32(x):
    """Return keys or values of any cache in fp32."""
    return widened(x, tl.float32).to(tl.float32)


@triton.jit
def narrowed(x, dtype: tl.constexpr):
    """Return keys or values in `dtype`, the type of a cache: numbers beyond the largest of e4m3 become the largest.

    Rounds to nearest, ties to even. NaN stays NaN.
    """
    if dtype == tl.uint8:
        x = x.to(tl.float32)
        sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
        magnitude = tl.minimum(tl.abs(x), E4M3_MAX)
        bits = magnitude.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - ((127 - 7) << 3)
        small = (magnitude + 16384.0).to(tl.int32, bitcast=True) & 0xF  # rounded to multiples of 2 ** -9
        code = tl.where(magnitude < 0.015625, small, normal)
        x = (tl.where(x != x, 0x7F, code) | sign).to(tl.uint8)
    elif dtype == tl.float8e4nv:
        x = x.to(tl.float32).to(dtype)
    else:
        x = x.to(dtype)
    return x


@triton.jit
def as_factor(q, cache: tl.constexpr):
    """Return queries in the type in which they are multiplied by keys of a cache of type `cache`."""
    if (cache == tl.uint8 or cache == tl.float8e4nv) and q.dtype == tl.bfloat16:
        q = tl.minimum(tl.maximum(q.to(tl.float32), -FLOAT16_MAX), FLOAT16_MAX).to(tl.float16)
    return q
