"""A chosen token with its log-probabilities, if requested: the result of a step and part of a worker's report."""

from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

MAX_LOGPROBS = 20
"""Most alternatives at a position."""


class FinishReason(IntEnum):
    """Why a request's output ends with a token."""

    NOT_FINISHED = 0
    STOP = 1
    LENGTH = 2


class Logprobs(NamedTuple):
    """Log-probabilities at a position: first the chosen token's, then the likeliest tokens' in falling order.

    A chosen token among the likeliest appears twice, with equal numbers.
    """

    token_ids: tuple[int, ...]
    values: tuple[float, ...]  # fp32


class OutputToken(NamedTuple):
    """An output token of a row."""

    token_id: int
    logprobs: Logprobs | None = None


@lru_cache(maxsize=1 << 14)
def plain_token(token_id: int) -> OutputToken:
    """Return a cached token without log-probabilities, because thousands pass a second and most repeat."""
    return OutputToken(token_id)
