"""Percentiles, as defined by load clients."""

import math
from collections.abc import Iterable, Sequence


def percentile(values: Iterable[float], percent: float) -> float:
    """Return a percentile, linear between the two nearest values; NaN without values."""
    ordered = sorted(values)
    if not ordered:
        return math.nan
    position = (len(ordered) - 1) * percent / 100
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def weighted_percentile(counted: Sequence[tuple[float, int]], percent: float) -> float:
    """Return a percentile of values with counts; NaN without values."""
    left = percent / 100 * sum(count for _, count in counted)
    for value, count in sorted(counted):
        left -= count
        if left <= 0:
            return value
    return math.nan
