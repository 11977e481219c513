"""Prompts under a grammar: what may follow them, and tokens after them that wait for their grammar's word."""

from dataclasses import dataclass, field

from common.grammar.follower import Follower
from common.grammar.followers import Followers
from common.kernels.base.operands import NO_CHOICE
from common.wire.values.output_token import OutputToken
from prefill_worker.sequence import PromptSequence


@dataclass(slots=True)
class Heard:
    """What grammars have said."""

    taken: list[tuple[PromptSequence, OutputToken, bool]] = field(default_factory=list)  # true: the text ends with it
    lost: list[tuple[PromptSequence, str]] = field(default_factory=list)  # what cannot go on, and why


class PromptGuides:
    """What is known of grammars; nothing here waits."""

    def __init__(self, followers: Followers[PromptSequence]) -> None:
        self.followers = followers

    def begin(self, sequence: PromptSequence) -> None:
        """Ask its grammar, if it has one, what may follow the outputs so far."""
        if sequence.sampling.grammar:
            sequence.follower = Follower.of(sequence.sampling)
            outputs = sequence.token_ids[len(sequence.token_ids) - sequence.num_outputs :]
            self.followers.ask(sequence, sequence.follower, outputs)

    def holds(self, sequence: PromptSequence, token: OutputToken) -> bool:
        """Whether nobody is told of the token before its grammar has taken it."""
        if sequence.follower is None or token.token_id in (NO_CHOICE, *sequence.sampling.stop_token_ids):
            return False
        sequence.unsent = token
        self.followers.ask(sequence, sequence.follower, [token.token_id])
        return True

    def hear(self) -> Heard:
        """What has become known of prompts that nobody has given up; their masks are theirs."""
        heard = Heard()
        for sequence, outcome in self.followers.take():
            token, sequence.unsent = sequence.unsent, None
            if sequence.ended:
                continue
            if token is None and outcome.mask is not None:
                sequence.mask = outcome.mask
            elif token is None or (outcome.problem and sequence.may_go_on):
                heard.lost.append((sequence, outcome.problem or "nothing can follow the text"))
            else:
                heard.taken.append((sequence, token, outcome.is_over))
        return heard
