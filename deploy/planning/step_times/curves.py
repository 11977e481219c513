"""Piecewise linear functions through measured points."""

from bisect import bisect_right
from collections.abc import Iterable

Point = tuple[float, float]


class Curve:
    """A function linear between points and beyond the last point; flat before the first unless `slanted`.

    Args:
        points: x and y, at least one, with distinct x.
        slanted: continue the first slope before the first point, but not below 0.
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
        xs, ys = self._xs, self._ys
        if len(xs) == 1 or (x <= xs[0] and not self._slanted):
            return ys[0]
        right = min(max(1, bisect_right(xs, x)), len(xs) - 1)
        slope = (ys[right] - ys[right - 1]) / (xs[right] - xs[right - 1])
        return max(0.0, ys[right - 1] + slope * (x - xs[right - 1]))
