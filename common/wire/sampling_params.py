"""How the next token of one request is chosen; travels from the router to both workers."""

from dataclasses import dataclass
from typing import Annotated

from common.wire.fields import Count, Length, Positive, Range

MAX_STOP_TOKENS = 64


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Validated by the router before it is sent.

    temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off. Filters apply in the order
    temperature, top-k, top-p, min-p. Random numbers are keyed on (seed, position of the token in
    the whole sequence), so a request gives the same text in any batch and after a replay.
    """

    max_tokens: Positive = 16
    temperature: Annotated[float, Range(0.0, 100.0)] = 1.0
    top_k: Count = 0
    top_p: Annotated[float, Range(0.0, 1.0)] = 1.0
    min_p: Annotated[float, Range(0.0, 1.0)] = 0.0
    seed: Annotated[int, Range(0, (1 << 63) - 1)] = 0  # the router draws one when the client sends none
    stop_token_ids: Annotated[tuple[Count, ...], Length(0, MAX_STOP_TOKENS)] = ()  # empty under ignore_eos
