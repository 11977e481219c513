"""What the kernels that filter tokens say of a logit: its bucket, its order, its weight.

All of them follow the logits: of two, the larger one has no lower order and no lower bucket, and weighs no less. An
order is that of logits over temperature, which is what ties; bucket and weight are taken of the logits themselves.
"""

import triton
import triton.language as tl

from common.kernels.base.operands import MAX_VOCAB

NUM_BUCKETS = tl.constexpr(128)
BUCKETS_PER_UNIT = tl.constexpr(16 / 3)  # of logit over temperature: all buckets together span 24
LEAST_PER_LOGIT = tl.constexpr(8 / 3)  # so that at a high temperature not all logits have the same bucket
MOST_PER_LOGIT = tl.constexpr(float(1 << 15))  # so that logits of up to 128 have buckets of their own
EDGE = tl.constexpr(float((1 << 22) - 1))  # buckets are whole numbers of which fp32 holds half, too
ROUNDER = tl.constexpr(float(3 << 22))  # adding it to a number leaves the nearest whole one in the low bits
ROUNDER_BITS = tl.constexpr(0x4B400000)
LOG2_E = tl.constexpr(1.4426950408889634)
LARGEST = tl.constexpr(1e30)
STEEPEST = tl.constexpr(1e38)  # finite, so that no distance is no distance
ID_BITS = tl.constexpr(MAX_VOCAB.bit_length() - 1)
LAST_ID = tl.constexpr(MAX_VOCAB - 1)
LOWEST_ORDER = tl.constexpr(-0x7F800001)  # that of -inf
MASS_ONE = tl.constexpr(float(1 << 42))  # the top token; what rounds to 0 weighs less than 1 - p for any fp32 p < 1


@triton.jit
def load_logits(row_ptr, tokens, num_tokens):
    """Logits of `tokens`; NaN and what is past the row read as -inf."""
    x = tl.load(row_ptr + tokens, mask=tokens < num_tokens, other=float("-inf"))
    return tl.where(x == x, x, float("-inf"))


@triton.jit
def load_filters(temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, row, VOCAB: tl.constexpr):
    """Temperature, top_k, top_p and min_p of a row, then whether it is filtered by each of the last three."""
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
    """The whole number nearest to `x * per_logit`, int32: buckets are of equal width. One holds all past an edge."""
    place = tl.minimum(tl.maximum(x * per_logit, -EDGE), EDGE)
    return (place + ROUNDER).to(tl.int32, bitcast=True) - ROUNDER_BITS


@triton.jit
def order_of(scaled):
    """fp32 as int32 of the same order, -0 as +0."""
    bits = tl.where(scaled == 0.0, 0.0, scaled).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def value_of(order):
    """The fp32 of an order."""
    return tl.where(order < 0, order ^ 0x7FFFFFFF, order).to(tl.float32, bitcast=True)


@triton.jit
def octaves_per_logit(temperature):
    """How often a logit that is larger by 1 doubles the weight."""
    return tl.minimum(tl.div_rn(LOG2_E, temperature), STEEPEST)


@triton.jit
def weight_of(x, top, octaves):
    """Probability relative to a token of logit `top`, which is finite and no less, fp32. One of +inf weighs as much."""
    return tl.exp2(tl.minimum(x - top, 0.0) * octaves)


@triton.jit
def mass_of(x, top, octaves):
    """Probability relative to the top token in fixed point, of which the top token has 2^42: int64."""
    return (weight_of(x, top, octaves) * MASS_ONE).to(tl.int64)


@triton.jit
def largest_of(x):
    """The largest of some logits; finite, so that distances to it are numbers."""
    return tl.minimum(tl.maximum(tl.max(x, axis=0), -LARGEST), LARGEST)


@triton.jit
def mass_limit(top_p, total):
    """Tokens whose likelier ones weigh less than this pass top-p; 1 at least, so that the top one does."""
    return tl.maximum(tl.ceil(top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def best_of(scores, ids):
    """The largest of `scores`, and the lowest of its ids."""
    best = tl.max(scores, axis=0)
    return best, tl.min(tl.where(scores == best, ids, 0x7FFFFFFF), axis=0)


@triton.jit
def key_of(scores, ids):
    """int64, not negative: larger for a better score, and of equal ones for a lower id."""
    return ((order_of(scores).to(tl.int64) - LOWEST_ORDER) << ID_BITS) + (LAST_ID - ids)


@triton.jit
def token_of(key):
    """The id in a key."""
    return LAST_ID - (key & LAST_ID).to(tl.int32)


@triton.jit
def is_token(key):
    """Whether the score in a key is more than -inf; of 0, which stands for no token, it is not."""
    return (key >> ID_BITS) > 0
