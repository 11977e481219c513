"""Where the limits of top-k and top-p are reached, to within a bucket: kernels 1 and 2 of `filter_threshold`.

A bucket is a range of distances to the largest logit of the row, so buckets are ordered as logits
are, and ties share one. Near the top they are narrow, far away they are wide, and the distance is the
one before the division by temperature, so that neither temperature nor spread puts many tokens near
a limit into one bucket. If something else does, only time is lost.
"""

import triton
import triton.language as tl

from common.kernels.last_program import is_last
from common.kernels.pdl import wait_for_predecessor

FIRST_BUCKET = tl.constexpr((127 - 6) << 7)  # sign, exponent, 7 bits of the mantissa: of distance 2^-6, fp32
NUM_BUCKETS = tl.constexpr(2048)  # 128 each time the distance doubles; 2^10 and more is all in the last one
MASS_ONE = tl.constexpr(float(1 << 42))  # the top token; what rounds to 0 weighs less than 1 - p for any fp32 p < 1
BOUNDARY_FIELDS = tl.constexpr(6)


@triton.jit
def load_logits(row_ptr, tokens, num_tokens):
    """Logits of `tokens`; NaN and what is past the row read as -inf."""
    x = tl.load(row_ptr + tokens, mask=tokens < num_tokens, other=float("-inf"))
    return tl.where(x == x, x, float("-inf"))


@triton.jit
def load_scaled(row_ptr, tokens, num_tokens, temperature):
    """Logits over temperature, as all below are."""
    return tl.div_rn(load_logits(row_ptr, tokens, num_tokens), temperature)


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
def _below(x, top):
    """x - top, 0 for two of the same infinity."""
    return tl.where(x == top, 0.0, tl.where(x == top, 0.0, x) - top)


@triton.jit
def bucket_of(x, top, floor, temperature):
    """Bucket of a scaled logit, 0 the likeliest: never falls as x does. All below `floor` are in the last one."""
    distance = -_below(x, top) * temperature
    bucket = (distance.to(tl.int32, bitcast=True) >> 16) - FIRST_BUCKET
    bucket = tl.minimum(tl.maximum(bucket, 0), NUM_BUCKETS - 1)
    return tl.where(x >= floor, bucket, NUM_BUCKETS - 1)


@triton.jit
def mass_of(x, top):
    """Probability relative to the top token, of which it is 2^42: int64."""
    return (tl.exp(_below(x, top)) * MASS_ONE).to(tl.int64)


@triton.jit
def mass_limit(top_p, total):
    """Tokens whose likelier ones weigh less than this pass top-p; 1 at least, so that the top one does."""
    return tl.maximum(tl.ceil(top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def part_max_kernel(
    logits_ptr,  # [num_rows, VOCAB] fp32, rows logits_stride apart
    temperature_ptr,  # [num_rows] fp32
    top_k_ptr,  # [num_rows] int32, 0 is off
    top_p_ptr,  # [num_rows] fp32, 1 is off
    min_p_ptr,  # [num_rows] fp32, 0 is off
    part_max_ptr,  # [num_rows, NUM_PARTS] fp32
    threshold_ptr,  # [num_rows] fp32: -inf for rows without filters
    logits_stride,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    PART: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (num_rows, programs of a row). Here as in the others, the programs of a row take its chunks in turns."""
    row = tl.program_id(0).to(tl.int64)
    _, _, _, _, by_k, by_p, by_min_p = load_filters(temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, row, VOCAB)
    wait_for_predecessor(PDL)
    if (by_k | by_p | by_min_p) == 0:
        if tl.program_id(1) == 0:
            tl.store(threshold_ptr + row, float("-inf"))
        return
    for begin in tl.range(tl.program_id(1) * CHUNK, VOCAB, tl.num_programs(1) * CHUNK):
        x = load_logits(logits_ptr + row * logits_stride, begin + tl.arange(0, CHUNK), VOCAB)
        parts = begin // PART + tl.arange(0, CHUNK // PART)
        largest = tl.max(tl.reshape(x, (CHUNK // PART, PART)), axis=1)
        tl.store(part_max_ptr + row * NUM_PARTS + parts, largest, mask=parts < NUM_PARTS)


@triton.jit
def _top_and_floor(
    part_max_ptr,
    temperature,
    top_k,
    top_p,
    by_k,
    by_p,
    VOCAB: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """The largest scaled logit, and one below which neither limit is reached: those tokens need no telling apart.

    Every part has a token that reaches the least of their maxima, so the k-th does if there are k
    parts. All tokens below (1 - p) / VOCAB together weigh less than 1 - p.
    """
    parts = tl.arange(0, PARTS)
    largest = tl.load(part_max_ptr + parts, mask=parts < NUM_PARTS, other=float("-inf"))
    top = tl.div_rn(tl.max(largest, axis=0), temperature)
    floor = tl.full((), float("-inf"), tl.float32)
    if by_k:
        if top_k <= NUM_PARTS:
            floor = tl.div_rn(tl.min(tl.where(parts < NUM_PARTS, largest, float("inf")), axis=0), temperature)
    elif by_p:
        floor = top + tl.log((1.0 - top_p) / VOCAB) - 1.0  # lower by a factor of e, for rounding
    return top, floor


@triton.jit
def _locate(counts_ptr, masses_ptr, boundary_ptr, top_k, top_p, by_k, by_p):
    """Which buckets the limits are reached in, from the histogram, which is set back to 0.

    Writes `boundary [6] int64`: the first and last bucket that top-p may end in; the bucket that top-k
    ends in; how many of it pass; the mass above the first; the mass above top-k's, of all without
    top-k. Top-p has several buckets because its total includes a part of top-k's. Without a filter its
    buckets hold nothing.
    """
    buckets = tl.arange(0, NUM_BUCKETS)
    counts = tl.load(counts_ptr + buckets, cache_modifier=".cg").to(tl.int64)
    masses = tl.load(masses_ptr + buckets, cache_modifier=".cg")
    tl.debug_barrier()  # every thread has read
    tl.store(counts_ptr + buckets, tl.zeros((NUM_BUCKETS,), tl.int32))
    tl.store(masses_ptr + buckets, tl.zeros((NUM_BUCKETS,), tl.int64))

    mass_above = tl.cumsum(masses, axis=0) - masses
    least = tl.sum(masses, axis=0)
    most = least
    k_bucket = tl.full((), NUM_BUCKETS, tl.int32)
    k_rest = tl.full((), 0, tl.int64)
    if by_k:
        num_above = tl.cumsum(counts, axis=0) - counts
        k_bucket = tl.sum((num_above < top_k).to(tl.int32), axis=0) - 1
        is_k = buckets == k_bucket
        k_rest = top_k - tl.sum(tl.where(is_k, num_above, 0), axis=0)
        least = tl.sum(tl.where(is_k, mass_above, 0), axis=0)
        most = least + tl.sum(tl.where(is_k, masses, 0), axis=0)
    first = tl.full((), NUM_BUCKETS, tl.int32)
    last = tl.full((), 0, tl.int32)
    if by_p:
        first = tl.sum((mass_above < mass_limit(top_p, least)).to(tl.int32), axis=0) - 1
        last = tl.sum((mass_above < mass_limit(top_p, most)).to(tl.int32), axis=0) - 1
    tl.store(boundary_ptr + 0, first)
    tl.store(boundary_ptr + 1, last)
    tl.store(boundary_ptr + 2, k_bucket)
    tl.store(boundary_ptr + 3, k_rest)
    tl.store(boundary_ptr + 4, tl.sum(tl.where(buckets == first, mass_above, 0), axis=0))
    tl.store(boundary_ptr + 5, least)


@triton.jit
def histogram_kernel(
    logits_ptr,  # [num_rows, VOCAB] fp32, rows logits_stride apart
    temperature_ptr,  # [num_rows] fp32
    top_k_ptr,  # [num_rows] int32
    top_p_ptr,  # [num_rows] fp32
    min_p_ptr,  # [num_rows] fp32
    part_max_ptr,  # [num_rows, NUM_PARTS] fp32
    counts_ptr,  # [num_rows, NUM_BUCKETS] int32, 0 before and after
    masses_ptr,  # [num_rows, NUM_BUCKETS] int64, 0 before and after
    arrivals_ptr,  # [num_rows] int32, 0 before and after
    edges_ptr,  # [num_rows, 2] fp32: top and floor, scaled
    boundary_ptr,  # [num_rows, 6] int64, see _locate
    logits_stride,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    PARTS: tl.constexpr,  # power of two, at least NUM_PARTS
    PDL: tl.constexpr,
):
    """Grid: (num_rows, programs of a row). The last bucket, where most tokens are, is added up before it is added."""
    row = tl.program_id(0).to(tl.int64)
    temperature, top_k, top_p, _, by_k, by_p, by_min_p = load_filters(
        temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, row, VOCAB
    )
    wait_for_predecessor(PDL)
    if (by_k | by_p | by_min_p) == 0:
        return
    part_max_ptr += row * NUM_PARTS
    top, floor = _top_and_floor(part_max_ptr, temperature, top_k, top_p, by_k, by_p, VOCAB, NUM_PARTS, PARTS)
    counts_ptr += row * NUM_BUCKETS
    masses_ptr += row * NUM_BUCKETS
    end = tl.where(by_k | by_p, VOCAB, 0)  # min-p needs the top only
    rest_count = tl.zeros((CHUNK,), tl.int32)
    rest_mass = tl.zeros((CHUNK,), tl.int64)
    for begin in tl.range(tl.program_id(1) * CHUNK, end, tl.num_programs(1) * CHUNK):
        tokens = begin + tl.arange(0, CHUNK)
        x = load_scaled(logits_ptr + row * logits_stride, tokens, VOCAB, temperature)
        bucket = bucket_of(x, top, floor, temperature)
        single = (tokens < VOCAB) & (bucket < NUM_BUCKETS - 1)
        rest = (tokens < VOCAB) & (bucket == NUM_BUCKETS - 1)
        if by_k:
            tl.atomic_add(counts_ptr + bucket, single.to(tl.int32), mask=single, sem="relaxed")
            rest_count += rest.to(tl.int32)
        if by_p:
            mass = mass_of(x, top)
            tl.atomic_add(masses_ptr + bucket, mass, mask=single & (mass > 0), sem="relaxed")
            rest_mass += tl.where(rest, mass, 0)
    if by_k:
        tl.atomic_add(counts_ptr + NUM_BUCKETS - 1, tl.sum(rest_count, axis=0), sem="relaxed")
    if by_p:
        tl.atomic_add(masses_ptr + NUM_BUCKETS - 1, tl.sum(rest_mass, axis=0), sem="relaxed")
    if is_last(arrivals_ptr + row, tl.num_programs(1)):
        tl.store(edges_ptr + row * 2, top)
        tl.store(edges_ptr + row * 2 + 1, floor)
        _locate(counts_ptr, masses_ptr, boundary_ptr + row * BOUNDARY_FIELDS, top_k, top_p, by_k, by_p)
