"""Noise that draws a token: `reference.gumbel` of any tokens."""

import triton
import triton.language as tl


@triton.jit
def exponential(bits):
    """Compute `reference.exponential` of 32 random bits."""
    signed = bits.to(tl.int32, bitcast=True)
    distance = ((signed ^ (signed >> 31)).to(tl.float32) + 0.5) * (2.0**-32)
    rest = 1.0 - distance
    lost = distance - (1.0 - rest)
    is_upper = signed >= 0
    return tl.where(is_upper, lost, 0.0) - tl.log(tl.where(is_upper, rest, distance))


@triton.jit
def _words(seed, position, fours):
    """Return four words of noise for each group of four tokens in `fours`: Philox 4x32-10 as in the reference."""
    key_low, key_high, _, _ = tl.philox(seed, position.to(tl.uint32), 0, 0, 0)
    key = (key_high.to(tl.uint64) << 32) | key_low.to(tl.uint64)
    return tl.philox(key, fours.to(tl.uint32), 0, 0, 0)


@triton.jit
def gumbel(seed, position, tokens):
    """Return standard Gumbel noise of any `tokens`, keyed on (seed, position)."""
    a, b, c, d = _words(seed, position, tokens >> 2)
    bits = tl.where((tokens & 2) == 0, tl.where((tokens & 1) == 0, a, b), tl.where((tokens & 1) == 0, c, d))
    return -tl.log(exponential(bits))


@triton.jit
def gumbel_from(seed, position, first, NUM: tl.constexpr):
    """Return the noise of NUM tokens from `first` on, a multiple of 4; each group's words are made only once."""
    a, b, c, d = _words(seed, position, first // 4 + tl.arange(0, NUM // 4))
    bits = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (NUM,))
    return -tl.log(exponential(bits))
