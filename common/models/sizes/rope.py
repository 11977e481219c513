"""Sizes of rotary embedding: which dimensions of a head turn, and how fast. Needs no torch."""

from dataclasses import dataclass
from typing import NamedTuple


class QueryGrowth(NamedTuple):
    """Growth of queries with their position: `1 + rate * ln(1 + floor(position / period))`."""

    rate: float
    period: int  # positions


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotation of pairs of dimensions of query and key heads by position (Su et al., 2021)."""

    inverse_frequencies: tuple[float, ...]  # radians a position; fewer than head_dim / 2 leave dimensions unrotated
    is_leading: bool = True  # where some dimensions do not turn, pairs are halves of the leading ones, not of the head
    factor: float = 1.0  # of cosines and sines
    growth: QueryGrowth | None = None


def inverse_frequencies(base: float, dim: int) -> list[float]:
    """Return rotary frequencies of plain RoPE, in radians a position: `[dim / 2]`."""
    return [float(base ** (-2.0 * i / dim)) for i in range(dim // 2)]
