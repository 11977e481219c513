"""Prompts under a grammar: masks for the first token, and first tokens held back until the grammar accepts."""

from dataclasses import dataclass, field

from common.grammar.follower import Follower
from common.grammar.followers import Followers
from common.kernels.base.sampling_operands import NO_CHOICE
from common.wire.values.output_token import OutputToken
from prefill_worker.sequence import PromptSequence


@dataclass(slots=True)
class Answers:
    """Answers of grammars."""

    taken: list[tuple[PromptSequence, OutputToken, bool]] = field(default_factory=list)  # true: the token ends the text
    lost: list[tuple[PromptSequence, str]] = field(default_factory=list)  # failed sequences with reasons


class PromptMasks:
    """Questions to grammars of prompts, and their answers; no method waits."""

    def __init__(self, followers: Followers[PromptSequence]) -> None:
        self.followers = followers

    def begin(self, sequence: PromptSequence) -> None:
        """Ask for the mask after the outputs so far, if the sequence has a grammar."""
        if sequence.sampling.grammar:
            sequence.follower = Follower.of(sequence.sampling)
            outputs = sequence.token_ids[len(sequence.token_ids) - sequence.num_outputs :]
            self.followers.ask(sequence, sequence.follower, outputs)

    def holds(self, sequence: PromptSequence, token: OutputToken) -> bool:
        """Hold a token back until the grammar accepts; return false for a token to be sent at once."""
        if sequence.follower is None or token.token_id in (NO_CHOICE, *sequence.sampling.stop_token_ids):
            return False
        sequence.unsent = token
        self.followers.ask(sequence, sequence.follower, [token.token_id])
        return True

    def take(self) -> Answers:
        """Return answers for live prompts; masks are stored in the sequences."""
        answers = Answers()
        for sequence, outcome in self.followers.take():
            token, sequence.unsent = sequence.unsent, None
            if sequence.ended:
                continue
            if token is None and outcome.mask is not None:
                sequence.mask = outcome.mask
            elif token is None or (outcome.problem and sequence.may_go_on):
                answers.lost.append((sequence, outcome.problem or "nothing can follow the text"))
            else:
                answers.taken.append((sequence, token, outcome.is_over))
        return answers
