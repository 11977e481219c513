"""The noise that draws a token: `reference.gumbel`, of whatever tokens are asked for."""

import triton
import triton.language as tl


@triton.jit
def exponential(bits):
    """`reference.exponential` of 32 random bits."""
    signed = bits.to(tl.int32, bitcast=True)
    distance = ((signed ^ (signed >> 31)).to(tl.float32) + 0.5) * (2.0**-32)
    rest = 1.0 - distance
    lost = distance - (1.0 - rest)
    is_upper = signed >= 0
    return tl.where(is_upper, lost, 0.0) - tl.log(tl.where(is_upper, rest, distance))


@triton.jit
def gumbel(seed, position, tokens):
    """Standard Gumbel noise of `tokens`, keyed on (seed, position): bits of Philox 4x32-10 as in the reference."""
    key_low, key_high, _, _ = tl.philox(seed, position.to(tl.uint32), 0, 0, 0)
    key = (key_high.to(tl.uint64) << 32) | key_low.to(tl.uint64)
    bits, _, _, _ = tl.philox(key, tokens.to(tl.uint32), 0, 0, 0)
    return -tl.log(exponential(bits))
