"""A text under a grammar, as its worker has it."""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from common.wire.values.sampling_params import SamplingParams


class Outcome(NamedTuple):
    """Where a text is in its grammar: a mask, an end, or a problem."""

    mask: np.ndarray | None = None  # [cdiv(vocab, 32)] int32: a bit for each token that may follow
    is_over: bool = False  # nothing may follow
    problem: str = ""


@dataclass(slots=True, eq=False, weakref_slot=True)
class Follower:
    """Names a grammar and the outputs that it has been told of; `Followers` know what may follow them.

    Args:
        stop_token_ids: of the model's end tokens these follow where a text may end, the others where nothing else can.
    """

    grammar: str
    stop_token_ids: Collection[int] = ()
    token_ids: list[int] = field(default_factory=list)

    @staticmethod
    def of(sampling: SamplingParams) -> "Follower":
        """For a request that has a grammar."""
        return Follower(sampling.grammar, sampling.stop_token_ids)
