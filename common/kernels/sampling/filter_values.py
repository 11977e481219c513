"""Values derived from a logit by the filter kernels: bucket, order, weight.

All are monotonic: a larger logit has no lower order, no lower bucket, and no less weight. An order belongs to logit
over temperature, because ties are defined there. Bucket and weight belong to the logit itself.
"""

import triton
import triton.language as tl

from common.kernels.base.sampling_operands import MAX_VOCAB

NUM_BUCKETS = tl.constexpr(128)
BUCKETS_PER_UNIT = tl.constexpr(16 / 3)  # of logit over temperature: all buckets together span 24
LEAST_PER_LOGIT = tl.constexpr(8 / 3)  # so that at a high temperature logits do not all share a bucket
MOST_PER_LOGIT = tl.constexpr(float(1 << 15))  # so that logits of up to 128 have separate buckets
EDGE = tl.constexpr(float((1 << 22) - 1))  # buckets are whole numbers up to where fp32 still holds halves
ROUNDER = tl.constexpr(float(3 << 22))  # added to a number, leaves the nearest whole number in the low bits
ROUNDER_BITS = tl.constexpr(0x4B400000)
LOG2_E = tl.constexpr(1.4426950408889634)
LARGEST = tl.constexpr(1e30)
STEEPEST = tl.constexpr(1e38)  # finite, so that distance 0 stays 0
ID_BITS = tl.constexpr(MAX_VOCAB.bit_length() - 1)
LAST_ID = tl.constexpr(MAX_VOCAB - 1)
LOWEST_ORDER = tl.constexpr(-0x7F800001)  # order of -inf
MASS_ONE = tl.constexpr(float(1 << 42))  # of the top token; a mass rounding to 0 is below 1 - p for any fp32 p < 1


@triton.jit
def load_logits(row_ptr, tokens, num_tokens):
    """Load logits of `tokens`; NaN and tokens past the row read as -inf."""
    x = tl.load(row_ptr + tokens, mask=tokens < num_tokens, other=float("-inf"))
    return tl.where(x == x, x, float("-inf"))


@triton.jit
def load_filters(temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, row, VOCAB: tl.constexpr):
    """Load temperature, top_k, top_p and min_p of a row; tell for each of the last three whether it filters."""
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    drawn = temperature > 0.0
    by_k = drawn & (top_k > 0) & (top_k < VOCAB)
    return temperature, top_k, top_p, min_p, by_k, drawn & (top_p < 1.0), drawn & (min_p > 0.0)


@triton.jit
def buckets_per_logit(temperature):
    return tl.minimum(tl.maximum(tl.div_rn(BUCKETS_PER_UNIT, temperature), LEAST_PER_LOGIT), MOST_PER_LOGIT)


@triton.jit
def bucket_of(x, per_logit):
    """Return the int32 nearest to `x * per_logit`; buckets have equal width, and end buckets hold all past EDGE."""
    place = tl.minimum(tl.maximum(x * per_logit, -EDGE), EDGE)
    return (place + ROUNDER).to(tl.int32, bitcast=True) - ROUNDER_BITS


@triton.jit
def order_of(scaled):
    """Map fp32 to int32 of the same order, with -0 as +0."""
    bits = tl.where(scaled == 0.0, 0.0, scaled).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def value_of(order):
    """Return the fp32 of an order."""
    return tl.where(order < 0, order ^ 0x7FFFFFFF, order).to(tl.float32, bitcast=True)


@triton.jit
def octaves_per_logit(temperature):
    """Return the number of doublings of weight for a logit larger by 1."""
    return tl.minimum(tl.div_rn(LOG2_E, temperature), STEEPEST)


@triton.jit
def weight_of(x, top, octaves):
    """Return the fp32 probability relative to a token of logit `top`, finite and no less; +inf weighs like `top`."""
    return tl.exp2(tl.minimum(x - top, 0.0) * octaves)


@triton.jit
def mass_of(x, top, octaves):
    """Return the int64 probability relative to the top token, in fixed point with 2^42 for the top token."""
    return (weight_of(x, top, octaves) * MASS_ONE).to(tl.int64)


@triton.jit
def largest_of(x):
    """Return the largest of some logits, made finite, so that distances are numbers."""
    return tl.minimum(tl.maximum(tl.max(x, axis=0), -LARGEST), LARGEST)


@triton.jit
def mass_limit(top_p, total):
    """Return top-p's limit: a token passes if likelier tokens weigh less; at least 1, so the top token passes."""
    return tl.maximum(tl.ceil(top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def best_of(scores, ids):
    """Return the largest of `scores`, and the lowest id with this score."""
    best = tl.max(scores, axis=0)
    return best, tl.min(tl.where(scores == best, ids, 0x7FFFFFFF), axis=0)


@triton.jit
def key_of(scores, ids):
    """Return a non-negative int64, larger for a better score, and for equal scores larger for a lower id."""
    return ((order_of(scores).to(tl.int64) - LOWEST_ORDER) << ID_BITS) + (LAST_ID - ids)


@triton.jit
def token_of(key):
    """Return the id in a key."""
    return LAST_ID - (key & LAST_ID).to(tl.int32)


@triton.jit
def is_token(key):
    """Tell whether the score in a key exceeds -inf; false for key 0, which stands for no token."""
    return (key >> ID_BITS) > 0
