"""Where exactly a limit of top-k or top-p is reached in a row's list: in one of many bins, and there among few logits.

The bins divide what is in question into equal steps, from its highest logit down. What each of them weighs is added up
while tokens are listed, so one scan of these sums finds the bin, and only the logits in it are compared, all with all.
"""

import triton
import triton.language as tl

from common.kernels.filter_limits import lowest_within
from common.kernels.filter_values import NUM_BUCKETS, buckets_per_logit, load_logits, mass_of, order_of

NUM_BINS = tl.constexpr(1024)
NUM_BINS_FP32 = tl.constexpr(float(NUM_BINS.value))
NUM_BUCKETS_FP32 = tl.constexpr(float(NUM_BUCKETS.value))
FEW = tl.constexpr(128)  # logits of a bin that are compared at once
NARROWEST = tl.constexpr(1e-30)  # so that the number of bins per logit is finite


@triton.jit
def bins_per_logit(lowest, highest, temperature):
    """Of the logits from `highest` down to `lowest`, or as far as buckets reach."""
    reach = tl.div_rn(NUM_BUCKETS_FP32, buckets_per_logit(temperature))
    width = tl.minimum(tl.maximum(highest - lowest, NARROWEST), reach)
    return tl.div_rn(NUM_BINS_FP32, width)


@triton.jit
def bin_of(x, highest, per_logit):
    """int32 below NUM_BINS. Of two logits, the larger one has no higher bin; one bin holds all further ones."""
    place = tl.minimum(tl.maximum((highest - x) * per_logit, 0.0), NUM_BINS_FP32).to(tl.int32)
    return tl.minimum(tl.maximum(place, 0), NUM_BINS - 1)


@triton.jit
def _bin_with_limit(sums, limit):
    """The bin at which `sums [NUM_BINS]` reach `limit`, or the last that has any; -1 if none has. The sum before it."""
    bins = tl.arange(0, NUM_BINS)
    before = tl.cumsum(sums, axis=0) - sums
    wanted = tl.max(tl.where((sums > 0) & (before < limit), bins, -1), axis=0)
    return wanted, tl.sum(tl.where(bins == wanted, before, 0), axis=0)


@triton.jit
def _gather_bin(list_ptr, size, few_ptr, wanted, highest, per_logit, BLOCK: tl.constexpr):
    """Stores the logits of bin `wanted` at `few_ptr`, as many as there is room for; their number."""
    number = tl.full((), 0, tl.int32)
    for begin in tl.range(0, size, BLOCK):
        places = begin + tl.arange(0, BLOCK)
        x = load_logits(list_ptr, places, size)
        is_in = (places < size) & (bin_of(x, highest, per_logit) == wanted)
        ones = is_in.to(tl.int32)
        entries = number + tl.cumsum(ones, axis=0) - 1
        tl.store(few_ptr + entries, x, mask=is_in & (entries < FEW))
        number += tl.sum(ones, axis=0)
    tl.debug_barrier()  # what one thread has stored another one loads
    return number


@triton.jit
def lowest_listed(
    list_ptr,
    size,
    few_ptr,  # [FEW] fp32, written
    sums,  # [NUM_BINS] int64: what the list's logits weigh, by bins
    limit,
    reach,
    top,
    temperature,
    MASS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """`lowest_within` of a list."""
    lowest, highest, _, _ = reach
    wanted, before = _bin_with_limit(sums, limit)
    number = _gather_bin(list_ptr, size, few_ptr, wanted, highest, bins_per_logit(lowest, highest, temperature), BLOCK)
    cut = order_of(tl.full((), float("-inf"), tl.float32))
    if number > FEW:
        cut = lowest_within(list_ptr, size, limit, top, temperature, MASS, TILE)
    elif number > 0:
        entries = tl.arange(0, FEW)
        x = load_logits(few_ptr, entries, number)
        weights = mass_of(x, top, temperature) if MASS else tl.full((FEW,), 1, tl.int64)
        above = tl.sum(tl.where(x[None, :] > x[:, None], tl.where(entries < number, weights, 0)[None, :], 0), axis=1)
        passes = (entries < number) & (above < limit - before)
        cut = order_of(tl.div_rn(tl.min(tl.where(passes, x, float("inf")), axis=0), temperature))
    return cut
