"""How the next token of one request is chosen; travels from the router to both workers."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Validated by the router before it is sent.

    temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off. Filters apply in the order
    temperature, top-k, top-p, min-p. Random numbers are keyed on (seed, position of the token in
    the whole sequence), so a request gives the same text in any batch and after a replay.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0  # unsigned 63 bits; the router draws one when the client sends none
    stop_token_ids: tuple[int, ...] = ()  # empty under ignore_eos
