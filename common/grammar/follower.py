"""A worker's view of a text under a grammar."""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from common.wire.values.sampling_params import SamplingParams


class Outcome(NamedTuple):
    """State of a text in its grammar: a mask, an end, or a problem."""

    mask: np.ndarray | None = None  # [cdiv(vocab, 32)] int32: a bit for each allowed token
    is_over: bool = False  # no token may follow
    problem: str = ""
    is_workers: bool = False  # the problem is this worker's, and need not hold elsewhere


@dataclass(slots=True, eq=False, weakref_slot=True)
class Follower:
    """A text's grammar and outputs so far; `Followers` computes the mask of allowed tokens.

    Args:
        stop_token_ids: end tokens allowed where a text may end; other end tokens only where nothing else is allowed.
    """

    grammar: str
    stop_token_ids: Collection[int] = ()
    token_ids: list[int] = field(default_factory=list)

    @staticmethod
    def of(sampling: SamplingParams) -> "Follower":
        """Make a follower for a request with a grammar."""
        return Follower(sampling.grammar, sampling.stop_token_ids)
