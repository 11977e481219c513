"""What a step yields."""

from collections.abc import Iterable
from dataclasses import dataclass

from common.wire.output_token import OutputToken


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The tokens that a step chose for each of its rows, in order: one or more, or NO_CHOICE alone."""

    rows: list[list[OutputToken]]

    @staticmethod
    def of_one_each(token_ids: Iterable[int]) -> "StepOutput":
        """A token a row, of which nothing else was asked."""
        return StepOutput([[OutputToken(token_id)] for token_id in token_ids])

    def token_ids(self) -> list[list[int]]:
        """The tokens alone."""
        return [[token.token_id for token in row] for row in self.rows]
