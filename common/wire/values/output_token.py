"""A token that was chosen and, where somebody asked, how likely it was: what steps yield and workers report."""

from functools import lru_cache
from typing import NamedTuple

MAX_LOGPROBS = 20
"""Likeliest tokens that can be asked for at a position."""


class Logprobs(NamedTuple):
    """Log-probabilities at one position: the chosen token's, then those of the likeliest, in falling order.

    The chosen one, if it is among the likeliest, is there twice, with the same number.
    """

    token_ids: tuple[int, ...]
    values: tuple[float, ...]  # numbers of fp32


class OutputToken(NamedTuple):
    """One token of a row."""

    token_id: int
    logprobs: Logprobs | None = None


@lru_cache(maxsize=1 << 14)
def plain_token(token_id: int) -> OutputToken:
    """One of which nothing else is told. Thousands pass a second, most of them often: those are made once."""
    return OutputToken(token_id)
