"""Tokens chosen by a step."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from common.wire.values.output_token import MAX_LOGPROBS, Logprobs, OutputToken, plain_token


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Tokens chosen for each row, in order: at least a token, or NO_CHOICE alone."""

    rows: list[list[OutputToken]]

    @staticmethod
    def of_one_each(token_ids: Iterable[int]) -> "StepOutput":
        """Build an output with a plain token for each row."""
        return StepOutput([[plain_token(token_id)] for token_id in token_ids])

    @staticmethod
    def with_logprobs(token_ids: Iterable[int], words: np.ndarray) -> "StepOutput":
        """Build an output with a token and log-probabilities for each row: `words [num_rows, LOGPROB_WORDS]` int32."""
        logprobs = map(_logprobs_of, words.tolist(), words.view(np.float32).tolist())
        return StepOutput([[OutputToken(*pair)] for pair in zip(token_ids, logprobs, strict=True)])

    def token_ids(self) -> list[list[int]]:
        return [[token.token_id for token in row] for row in self.rows]


def _logprobs_of(words: list[int], values: list[float]) -> Logprobs | None:
    """Decode a row given as int32 and as float32: number of entries, then ids, then values."""
    num, first_value = words[0], 2 + MAX_LOGPROBS
    return Logprobs(tuple(words[1 : 1 + num]), tuple(values[first_value : first_value + num])) if num else None
