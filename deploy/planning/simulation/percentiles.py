"""Percentiles, as load clients have them."""

import math
from collections.abc import Iterable, Sequence


def percentile(values: Iterable[float], percent: float) -> float:
    """Linear between the two nearest; NaN of nothing."""
    ordered = sorted(values)
    if not ordered:
        return math.nan
    position = (len(ordered) - 1) * percent / 100
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def weighted_percentile(counted: Sequence[tuple[float, int]], percent: float) -> float:
    """Of values that each occur so often; NaN of nothing."""
    left = percent / 100 * sum(count for _, count in counted)
    for value, count in sorted(counted):
        left -= count
        if left <= 0:
            return value
    return math.nan
