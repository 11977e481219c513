"""Piecewise linear functions through measured points."""

from bisect import bisect_right
from collections.abc import Iterable

Point = tuple[float, float]


class Curve:
    """Through points, straight between them and beyond the last; before the first it is flat unless `slanted`.

    Args:
        points: x and y, at least one, of x that differ.
        slanted: goes on before the first point as it does behind it, and never below 0.
    """

    def __init__(self, points: Iterable[Point], *, slanted: bool = False) -> None:
        ordered = sorted(points)
        if not ordered:
            raise ValueError("a curve without points")
        self._xs = [x for x, _ in ordered]
        self._ys = [y for _, y in ordered]
        if len(set(self._xs)) < len(self._xs):
            raise ValueError(f"a curve with two values at one place: {self._xs}")
        self._slanted = slanted

    def at(self, x: float) -> float:
        """The value there."""
        xs, ys = self._xs, self._ys
        if len(xs) == 1 or (x <= xs[0] and not self._slanted):
            return ys[0]
        right = min(max(1, bisect_right(xs, x)), len(xs) - 1)
        slope = (ys[right] - ys[right - 1]) / (xs[right] - xs[right - 1])
        return max(0.0, ys[right - 1] + slope * (x - xs[right - 1]))
