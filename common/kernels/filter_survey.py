"""In which range of logits the limits of top-k and top-p lie: the first kernel of `filtered_draw`.

Every program counts the tokens of its chunk in buckets of equal width, below the largest logit of the chunk. The last
one of a row adds them up, below the largest of all. How many tokens a bucket has, and how far at most and at least they
are from the top, bounds what it weighs. So it is known of which buckets all tokens pass, of which none do, and that
the limits are in those between. The bounds only say where to look: what is found there is checked.
"""

import triton
import triton.language as tl

from common.kernels.filter_values import (
    EDGE,
    NUM_BUCKETS,
    bucket_of,
    buckets_per_logit,
    load_filters,
    load_logits,
    weight_of,
)
from common.kernels.last_program import is_last
from common.kernels.pdl import wait_for_predecessor

PLAN_FIELDS = tl.constexpr(4)
SLACK = tl.constexpr(1e-5)  # of the bounds, for rounding
LOWEST = tl.constexpr(-(1 << 30))  # below all buckets
HIGHEST = tl.constexpr(1 << 30)
CHUNKS_AT_ONCE = 32


@triton.jit
def survey_kernel(
    logits_ptr,  # [num_rows, VOCAB] fp32, rows logits_stride apart
    temperature_ptr,  # [num_rows] fp32
    top_k_ptr,  # [num_rows] int32, 0 is off
    top_p_ptr,  # [num_rows] fp32, 1 is off
    min_p_ptr,  # [num_rows] fp32, 0 is off
    largest_ptr,  # [num_rows, NUM_CHUNKS] fp32
    weights_ptr,  # [num_rows, NUM_CHUNKS] fp32, relative to the largest of the chunk
    counts_ptr,  # [num_rows, NUM_CHUNKS, NUM_BUCKETS] int32
    arrivals_ptr,  # [num_rows] int32, 0 before and after
    top_ptr,  # [num_rows] fp32
    plan_ptr,  # [num_rows, PLAN_FIELDS] int32, see _plan
    logits_stride,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    CHUNKS: tl.constexpr,  # power of two, at least NUM_CHUNKS
    CHUNKS_AT_ONCE: tl.constexpr,
    ROOM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (num_rows, NUM_CHUNKS)."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    temperature, top_k, top_p, _, by_k, by_p, by_min_p = load_filters(
        temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, row, VOCAB
    )
    wait_for_predecessor(PDL)
    if (by_k | by_p | by_min_p) == 0:
        return
    largest_ptr += row * NUM_CHUNKS
    weights_ptr += row * NUM_CHUNKS
    counts_ptr += row * NUM_CHUNKS * NUM_BUCKETS
    per_logit = buckets_per_logit(temperature)
    x = load_logits(logits_ptr + row * logits_stride, chunk * CHUNK + tl.arange(0, CHUNK), VOCAB)
    largest = tl.max(x, axis=0)
    tl.store(largest_ptr + chunk, largest)
    if by_k | by_p:  # min-p needs the top only
        below = tl.minimum(bucket_of(largest, per_logit) - bucket_of(x, per_logit), NUM_BUCKETS - 1)
        counts = tl.histogram(below, NUM_BUCKETS)
        tl.store(counts_ptr + chunk * NUM_BUCKETS + tl.arange(0, NUM_BUCKETS), counts)
        tl.store(weights_ptr + chunk, tl.sum(weight_of(x, largest, temperature), axis=0))
    if is_last(arrivals_ptr + row, NUM_CHUNKS):
        chunks = tl.arange(0, CHUNKS)
        all_largest = tl.load(largest_ptr + chunks, mask=chunks < NUM_CHUNKS, other=float("-inf"))
        top = tl.max(all_largest, axis=0)
        tl.store(top_ptr + row, top)
        if by_k | by_p:
            weights = tl.load(weights_ptr + chunks, mask=chunks < NUM_CHUNKS, other=0.0)
            total = tl.sum(weights * weight_of(all_largest, top, temperature), axis=0)
            counts = _add_up(counts_ptr, largest_ptr, top, per_logit, VOCAB, NUM_CHUNKS, CHUNKS_AT_ONCE)
            _plan(plan_ptr + row * PLAN_FIELDS, counts, total, top, temperature, top_k, top_p, by_k, by_p, ROOM)


@triton.jit
def _add_up(
    counts_ptr, largest_ptr, top, per_logit, VOCAB: tl.constexpr, NUM_CHUNKS: tl.constexpr, AT_ONCE: tl.constexpr
):
    """Tokens in each bucket from the top's on: `[NUM_BUCKETS]` int32. The last one holds all further ones, too."""
    buckets = tl.arange(0, NUM_BUCKETS)
    top_bucket = bucket_of(top, per_logit)
    counts = tl.zeros((AT_ONCE, NUM_BUCKETS), tl.int32)
    for begin in tl.range(0, NUM_CHUNKS, AT_ONCE):
        chunks = begin + tl.arange(0, AT_ONCE)
        largest = tl.load(largest_ptr + chunks, mask=chunks < NUM_CHUNKS, other=float("-inf"))
        below = buckets[None, :] - (top_bucket - bucket_of(largest, per_logit))[:, None]
        present = (chunks < NUM_CHUNKS)[:, None] & (below >= 0) & (buckets < NUM_BUCKETS - 1)[None, :]
        counts += tl.load(counts_ptr + chunks[:, None] * NUM_BUCKETS + below, mask=present, other=0)
    whole = tl.sum(counts, axis=0)
    return tl.where(buckets < NUM_BUCKETS - 1, whole, VOCAB - tl.sum(whole, axis=0))


@triton.jit
def _plan(plan_ptr, counts, total, top, temperature, top_k, top_p, by_k, by_p, ROOM: tl.constexpr):
    """Where to look for the limits.

    Writes `plan [4] int32`: the lowest and the highest bucket that a limit may be in; the tokens above, which pass;
    whether those of the buckets are few enough for a list of ROOM.
    """
    buckets = tl.arange(0, NUM_BUCKETS)
    per_logit = buckets_per_logit(temperature)
    top_bucket = bucket_of(top, per_logit)
    place = tl.minimum(tl.maximum(top * per_logit, -EDGE), EDGE) - top_bucket.to(tl.float32)
    nearest = tl.maximum(buckets.to(tl.float32) + (place - 0.5), 0.0) / per_logit  # to the top, in logits
    farthest = (buckets.to(tl.float32) + (place + 0.5)) / per_logit
    farthest = tl.where(buckets < NUM_BUCKETS - 1, farthest, float("inf"))
    most = counts.to(tl.float32) * weight_of(-nearest, 0.0, temperature)
    least = counts.to(tl.float32) * weight_of(-farthest, 0.0, temperature)
    most_to_there = tl.cumsum(most, axis=0)  # the bucket and all above
    least_to_there = tl.cumsum(least, axis=0)
    num_to_there = tl.cumsum(counts, axis=0)
    most_beyond = tl.sum(most, axis=0) - most_to_there
    least_beyond = tl.sum(least, axis=0) - least_to_there
    most_to_there = tl.minimum(most_to_there, total - least_beyond)
    least_to_there = tl.maximum(least_to_there, total - most_beyond)
    least_kept = total
    if by_k:
        lowest = tl.sum((num_to_there < top_k).to(tl.int32), axis=0)
        least_kept = tl.sum(tl.where(buckets == lowest - 1, least_to_there, 0.0), axis=0)
    else:
        lowest = tl.sum((least_to_there < top_p * total * (1.0 + SLACK)).to(tl.int32), axis=0)
        lowest = tl.minimum(lowest, NUM_BUCKETS - 1)
    highest = lowest
    if by_p:
        highest = tl.sum((most_to_there < top_p * least_kept * (1.0 - SLACK)).to(tl.int32), axis=0)
        highest = tl.minimum(highest, lowest)
    num_above = tl.sum(tl.where(buckets < highest, counts, 0), axis=0)
    num_listed = tl.sum(tl.where((buckets >= highest) & (buckets <= lowest), counts, 0), axis=0)
    tl.store(plan_ptr, tl.where(lowest < NUM_BUCKETS - 1, top_bucket - lowest, LOWEST))
    tl.store(plan_ptr + 1, top_bucket - highest)
    tl.store(plan_ptr + 2, num_above)
    tl.store(plan_ptr + 3, (num_listed <= ROOM).to(tl.int32))
