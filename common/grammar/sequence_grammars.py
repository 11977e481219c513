"""Grammars of a worker's sequences: masks for the next tokens, and tokens held until the grammar accepts them.

begin ──▶ asked ──take──▶ mask known ──hold──▶ token held, asked ──take──▶ token accepted, next mask known
              └───────────take: a problem; the sequence fails◀───────────────┘
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from common.base.errors import ErrorCode
from common.grammar.follower import Follower
from common.grammar.followers import Followers
from common.wire.messages.worker import FinishReason
from common.wire.values.output_token import OutputToken
from common.wire.values.sampling_params import SamplingParams


class HeldToken(NamedTuple):
    """A chosen token, and whether and why it ends the request apart from the grammar."""

    token: OutputToken
    reason: FinishReason


@dataclass(slots=True, eq=False)
class GrammarState:
    """State of a sequence under a grammar."""

    follower: Follower
    mask: np.ndarray | None = None  # tokens allowed next, once known
    held: HeldToken | None = None  # the last token, until accepted


class GuidedSequence(Protocol):
    """A sequence that may be under a grammar."""

    grammar: GrammarState | None
    ended: bool

    @property
    def sampling(self) -> SamplingParams:
        """Sampling parameters, with the grammar."""

    @property
    def outputs(self) -> Sequence[int]:
        """Token ids of all outputs so far."""


AnySequence = TypeVar("AnySequence", bound=GuidedSequence)


class GrammarAnswer(NamedTuple, Generic[AnySequence]):
    """Answer for a live sequence."""

    sequence: AnySequence
    held: HeldToken | None  # accepted; None: the answer is only about the next token
    problem: str  # "": the sequence goes on
    code: ErrorCode  # of the problem


class SequenceGrammars(Generic[AnySequence]):
    """Questions to grammars, and answers; no method waits."""

    def __init__(self, followers: Followers[AnySequence]) -> None:
        self.followers = followers

    def begin(self, sequence: AnySequence) -> None:
        """Ask for the tokens allowed after the outputs so far, if the sequence has a grammar."""
        if sequence.sampling.grammar:
            sequence.grammar = GrammarState(Follower.of(sequence.sampling))
            self.followers.ask(sequence, sequence.grammar.follower, sequence.outputs)

    def hold(self, sequence: AnySequence, token: OutputToken, reason: FinishReason) -> bool:
        """Hold a token until the grammar accepts; false for a token to be sent at once: no grammar, or a stop token.

        Args:
            reason: whether and why the token ends the request apart from the grammar.
        """
        if sequence.grammar is None or reason is FinishReason.STOP:
            return False
        sequence.grammar.held, sequence.grammar.mask = HeldToken(token, reason), None
        self.followers.ask(sequence, sequence.grammar.follower, [token.token_id])
        return True

    def take(self) -> list[GrammarAnswer[AnySequence]]:
        """Take the answers for live sequences; masks are stored in the sequences."""
        answers = []
        for sequence, outcome in self.followers.take():
            state = sequence.grammar
            if sequence.ended or state is None:
                continue
            held, state.held, state.mask = state.held, None, outcome.mask
            if held is not None and outcome.is_over:
                held = held._replace(reason=FinishReason.STOP)
            problem = ""
            if held is None or held.reason is FinishReason.NOT_FINISHED:
                problem = outcome.problem or ("" if outcome.mask is not None else "nothing can follow the text")
            code = ErrorCode.INTERNAL if outcome.is_workers else ErrorCode.GRAMMAR
            answers.append(GrammarAnswer(sequence, held, problem, code))
        return answers
