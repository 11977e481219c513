"""Range of logits in which the limits of top-k and top-p lie: the first kernel of `filtered_draw`.

Every program adds up the weights of the tokens of a chunk. The program also counts a fixed random sample of the tokens
in buckets of equal width below the largest logit of the chunk. The last program of a row adds up the chunks, below the
largest of all logits. Numbers of tokens in buckets, and the buckets' distances from the top, bound the weight of tokens
beyond a bucket, up to the sampling error. Two logits follow, with overwhelming probability: all tokens above the higher
pass, all tokens below the lower fail, and the limits lie between. The range only says where to look: results found
there are checked.
"""

import triton
import triton.language as tl

from common.kernels.base.last_program import is_last
from common.kernels.base.pdl import wait_for_predecessor
from common.kernels.sampling.filter_values import (
    EDGE,
    LARGEST,
    NUM_BUCKETS,
    bucket_of,
    buckets_per_logit,
    largest_of,
    load_filters,
    load_logits,
    octaves_per_logit,
    weight_of,
)

PLAN_FIELDS = tl.constexpr(3)
LOWEST = tl.constexpr(-3.4e38)  # tokens of -inf may pass, but are never drawn
ROUNDING = tl.constexpr(1e-5)  # of a logit, a generous bound
SLACK = tl.constexpr(1e-5)  # rounding of sums of weights, relative; a plan keeps twice as far from limits
DEVIATIONS = tl.constexpr(5.0)  # of the sampling error; larger errors are most unlikely
GOLDEN = tl.constexpr(0x9E3779B1)  # multiples modulo 2^32 are spread evenly
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
    numbers_ptr,  # [num_rows, NUM_CHUNKS] int32: tokens counted
    counts_ptr,  # [num_rows, NUM_CHUNKS, NUM_BUCKETS] int32
    arrivals_ptr,  # [num_rows] int32, 0 before and after
    top_ptr,  # [num_rows] fp32: the largest of all logits, made finite
    total_ptr,  # [num_rows] fp32: weight of all tokens relative to the largest, up to SLACK
    plan_ptr,  # [num_rows, PLAN_FIELDS] fp32, see _plan
    logits_stride,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    CHUNKS: tl.constexpr,  # power of two, at least NUM_CHUNKS
    CHUNKS_AT_ONCE: tl.constexpr,
    SAMPLE: tl.constexpr,
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
    numbers_ptr += row * NUM_CHUNKS
    counts_ptr += row * NUM_CHUNKS * NUM_BUCKETS
    per_logit = buckets_per_logit(temperature)
    octaves = octaves_per_logit(temperature)
    row_ptr = logits_ptr + row * logits_stride
    x = load_logits(row_ptr, chunk * CHUNK + tl.arange(0, CHUNK), VOCAB)
    largest = largest_of(x)
    tl.store(largest_ptr + chunk, largest)
    if by_k | by_p:  # min-p needs the top only
        tl.store(weights_ptr + chunk, tl.sum(weight_of(x, largest, octaves), axis=0))
        places = tl.arange(0, SAMPLE)
        shift = (places.to(tl.uint32) * GOLDEN >> 16) % (CHUNK // SAMPLE)
        sample = x
        if CHUNK > SAMPLE:
            sample = load_logits(row_ptr, chunk * CHUNK + places * (CHUNK // SAMPLE) + shift.to(tl.int32), VOCAB)
        below = tl.minimum(bucket_of(largest, per_logit) - bucket_of(sample, per_logit), NUM_BUCKETS - 1)
        counts = tl.histogram(tl.maximum(below, 0), NUM_BUCKETS, mask=sample > float("-inf"))
        tl.store(counts_ptr + chunk * NUM_BUCKETS + tl.arange(0, NUM_BUCKETS), counts)
        tl.store(numbers_ptr + chunk, tl.sum(counts, axis=0))
    if is_last(arrivals_ptr + row, NUM_CHUNKS):
        chunks = tl.arange(0, CHUNKS)
        present = chunks < NUM_CHUNKS
        all_largest = tl.load(largest_ptr + chunks, mask=present, other=float("-inf"))
        weights = tl.load(weights_ptr + chunks, mask=present, other=0.0)  # without meaning if there is nothing to plan
        numbers = tl.load(numbers_ptr + chunks, mask=present, other=0)
        top = largest_of(all_largest)
        tl.store(top_ptr + row, top)
        if by_k | by_p:
            total = tl.sum(weights * weight_of(all_largest, top, octaves), axis=0)
            tl.store(total_ptr + row, total)
            number = tl.sum(numbers, axis=0)
            counts = _add_up(counts_ptr, largest_ptr, number, top, per_logit, NUM_CHUNKS, CHUNKS_AT_ONCE)
            _plan(
                plan_ptr + row * PLAN_FIELDS, counts, total, top, temperature, top_k, top_p, by_k, by_p,
                CHUNK // SAMPLE, ROOM,
            )  # fmt: skip


@triton.jit
def _add_up(counts_ptr, largest_ptr, number, top, per_logit, NUM_CHUNKS: tl.constexpr, AT_ONCE: tl.constexpr):
    """Add up counted tokens, `number` in all, by buckets from the top: `[NUM_BUCKETS]` int32; the last has the rest."""
    buckets = tl.arange(0, NUM_BUCKETS)
    top_bucket = bucket_of(top, per_logit)
    counts = tl.zeros((AT_ONCE, NUM_BUCKETS), tl.int32)
    for begin in tl.static_range(0, NUM_CHUNKS, AT_ONCE):  # all loads are on the way at once
        chunks = begin + tl.arange(0, AT_ONCE)
        largest = tl.load(largest_ptr + chunks, mask=chunks < NUM_CHUNKS, other=float("-inf"))
        below = buckets[None, :] - (top_bucket - bucket_of(largest, per_logit))[:, None]
        present = (chunks < NUM_CHUNKS)[:, None] & (below >= 0) & (buckets < NUM_BUCKETS - 1)[None, :]
        counts += tl.load(counts_ptr + chunks[:, None] * NUM_BUCKETS + below, mask=present, other=0)
    whole = tl.sum(counts, axis=0)
    return tl.where(buckets < NUM_BUCKETS - 1, whole, number - tl.sum(whole, axis=0))


@triton.jit
def _error(counted, unit, SHARE: tl.constexpr):
    """Bound the error of `counted`, found in a sample of 1 in SHARE of tokens weighing at most `unit`."""
    seen = counted + unit * ((SHARE - 1) * DEVIATIONS * DEVIATIONS)
    return DEVIATIONS * tl.sqrt((SHARE - 1) * unit * seen)


@triton.jit
def _plan(
    plan_ptr,
    counts,
    total,
    top,
    temperature,
    top_k,
    top_p,
    by_k,
    by_p,
    SHARE: tl.constexpr,
    ROOM: tl.constexpr,
):
    """Plan where to look for the limits.

    Writes `plan [3] fp32`: the lowest logit that may pass; the highest logit that may fail; whether tokens between fit
    into a list of ROOM.
    """
    buckets = tl.arange(0, NUM_BUCKETS)
    is_inner = buckets < NUM_BUCKETS - 1
    per_logit = buckets_per_logit(temperature)
    place = tl.minimum(tl.maximum(top * per_logit, -EDGE), EDGE) - bucket_of(top, per_logit).to(tl.float32)
    nearest = tl.maximum(buckets.to(tl.float32) + (place - 0.5), 0.0) / per_logit  # to the top, in logits
    farthest = (buckets.to(tl.float32) + (place + 0.5)) / per_logit
    octaves = octaves_per_logit(temperature)
    weight_near = weight_of(-nearest, 0.0, octaves)
    weight_far = weight_of(-farthest, 0.0, octaves)
    tokens = counts.to(tl.float32) * SHARE
    most = tokens * weight_near
    least = tl.where(is_inner, tokens * weight_far, 0.0)
    most_beyond = tl.maximum(tl.cumsum(most, axis=0, reverse=True) - most, 0.0)
    least_beyond = tl.maximum(tl.cumsum(least, axis=0, reverse=True) - least, 0.0)
    least_to_there = total - most_beyond - tl.where(is_inner, _error(most_beyond, weight_far, SHARE), 0.0)
    most_to_there = total - least_beyond + tl.where(is_inner, _error(least_beyond, weight_far, SHARE), 0.0)

    least_kept = total
    lowest = tl.full((), NUM_BUCKETS - 1, tl.int32)
    highest = tl.full((), NUM_BUCKETS - 1, tl.int32)
    # Sums up to a bucket grow with the bucket, but their bounds need not, because bounds tighten with fewer tokens
    # left.
    if by_k:
        num_to_there = tl.cumsum(tokens, axis=0)
        error = tl.where(is_inner, _error(num_to_there, 1.0, SHARE), 0.0)
        lowest = tl.min(tl.where(num_to_there - error >= top_k, buckets, NUM_BUCKETS - 1), axis=0)
        highest = tl.max(tl.where(num_to_there + error < top_k, buckets + 1, 0), axis=0)
        if by_p:
            least_kept = tl.maximum(tl.sum(tl.where(buckets == highest - 1, least_to_there, 0.0), axis=0), 0.0)
    elif by_p:
        enough = top_p * total * (1.0 + 2 * SLACK)
        lowest = tl.min(tl.where(least_to_there >= enough, buckets, NUM_BUCKETS - 1), axis=0)
    if by_p:
        enough = top_p * least_kept * (1.0 - 2 * SLACK)
        highest = tl.minimum(highest, tl.max(tl.where(most_to_there < enough, buckets + 1, 0), axis=0))
    num_between = tl.sum(tl.where((buckets >= highest) & (buckets <= lowest), tokens, 0.0), axis=0)
    reaches_all = lowest == NUM_BUCKETS - 1
    tl.store(plan_ptr, tl.where(reaches_all, LOWEST, top - (lowest.to(tl.float32) + (place + 0.5)) / per_logit))
    tl.store(plan_ptr + 1, top - tl.maximum(highest.to(tl.float32) + (place - 0.5), 0.0) / per_logit)
    tl.store(plan_ptr + 2, (num_between <= ROOM).to(tl.float32))


@triton.jit
def load_reach(plan_ptr, top, temperature, min_p, is_planned, by_min_p):
    """Load the lowest logit that may pass, the highest logit that may fail, and whether tokens between are listed.

    Then follow min-p's limit and the largest value not listed, both as scaled logits.
    """
    least = tl.full((), float("-inf"), tl.float32)
    lowest = tl.full((), float("-inf"), tl.float32)
    has_choice = top > -LARGEST
    if by_min_p & has_choice:  # min-p alone leaves nothing uncertain
        distance = tl.log(min_p) * temperature
        least = tl.div_rn(top, temperature) + tl.log(min_p)
        lowest = top + distance - (tl.abs(top) - distance) * ROUNDING
    highest = tl.full((), float("-inf"), tl.float32)
    is_listed = tl.full((), 1.0, tl.float32)
    if is_planned:
        lowest = tl.load(plan_ptr)
        highest = tl.load(plan_ptr + 1)
        is_listed = tl.load(plan_ptr + 2)
    if (has_choice == 0) | (is_listed == 0.0):  # or too many tokens for a list
        lowest = tl.full((), float("inf"), tl.float32)
    highest = tl.maximum(highest, lowest)
    is_whole = lowest == LOWEST
    unlisted = tl.where(is_whole, float("-inf"), tl.div_rn(tl.where(is_whole, 0.0, lowest), temperature))
    return lowest, highest, is_listed > 0.0, least, unlisted
