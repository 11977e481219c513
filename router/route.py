"""What a completion asks of workers, and the pair that it is sent to."""

from dataclasses import dataclass

from common.wire.kv_layout import Counts
from router.member import Member
from router.prefix_map import Beginnings

FORESEEN_TOKENS = 1024
"""Outputs that a sequence is expected to have at most: few come near their max_tokens. Of those that grow on, workers
tell by the blocks that they have left."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What a completion asks of the pair that takes it."""

    num_tokens: int  # prompt and outputs so far: computed as a prompt
    max_total_tokens: int  # prompt and the most outputs it may have
    avoided: Member | None = None  # gave it back: anybody else is better
    is_trial: bool = False  # it wants workers without anything unproven
    beginnings: Beginnings = ()  # by which it is known what of it lies where; none while there is one pool only

    @property
    def expected_tokens(self) -> int:
        """That it is expected to have at its end."""
        return min(self.max_total_tokens, self.num_tokens + FORESEEN_TOKENS)

    def covers(self, other: "Demand") -> bool:
        """Whether nobody takes this who does not take the other."""
        return (
            self.num_tokens >= other.num_tokens
            and self.max_total_tokens >= other.max_total_tokens
            and self.is_trial >= other.is_trial
        )


LEAST = Demand(num_tokens=1, max_total_tokens=1)
"""Asks for nothing but a free place."""


@dataclass(frozen=True, slots=True)
class Route:
    """Who computes the prompt and who decodes; the same worker when it does both."""

    prefill: Member
    decode: Member
    expected_blocks: Counts  # at the decode worker
    overtakes: bool = False  # sent ahead of its turn
    num_known: int = 0  # tokens of its prompt that are expected to be there

    @property
    def is_local(self) -> bool:
        return self.prefill is self.decode

    @property
    def workers(self) -> set[Member]:
        return {self.prefill, self.decode}
