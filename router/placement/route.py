"""A completion's demand on workers, and the pair chosen for it."""

from dataclasses import dataclass
from typing import NamedTuple

from common.wire.values.kv_layout import Counts, KVLayout
from router.placement.member import Member
from router.placement.text_keys import TextKeys

FORESEEN_TOKENS = 1024
"""Expected outputs of a sequence at most, because few come near their max_tokens. Workers show longer ones by their
free blocks."""
MOVED_AT_ONCE = 4
"""Tokens of KV moved to another pool per token of cost at least. A copy within a host is cheaper, but moved blocks then
occupy two pools."""
LOAD_TOKENS = 32_768
"""Cost of a full decode worker, in tokens; a half full worker costs half."""


@dataclass(frozen=True, slots=True)
class Demand:
    """Needs of a completion that a pair must meet."""

    num_tokens: int  # prompt and outputs so far, all computed as a prompt
    max_total_tokens: int  # prompt and the maximum of outputs
    avoided: Member | None = None  # gave the completion back; chosen last
    is_trial: bool = False  # needs workers without unproven sequences
    texts: tuple[TextKeys, ...] = ()  # for prefix lookups, a layout each; none without a choice
    takes_trip: bool = False  # needs a prefill worker, if any is there

    @property
    def expected_tokens(self) -> int:
        """Tokens expected at the end of the completion."""
        return min(self.max_total_tokens, self.num_tokens + FORESEEN_TOKENS)

    def text_in(self, layout: KVLayout) -> TextKeys | None:
        """Return the text's keys in a layout, None if not made."""
        return next((text for text in self.texts if text.layout == layout), None)

    def covers(self, other: "Demand") -> bool:
        """Tell whether every worker that takes this demand also takes the other."""
        return (
            self.num_tokens >= other.num_tokens
            and self.max_total_tokens >= other.max_total_tokens
            and self.is_trial >= other.is_trial
            and self.takes_trip >= other.takes_trip
        )


LEAST = Demand(num_tokens=1, max_total_tokens=1, takes_trip=True)
"""Needs nothing but a free place."""


class Cost(NamedTuple):
    """Cost of a request at a pair, in tokens unless stated otherwise."""

    num_waiting: int = 0  # sent to the prefill worker earlier, not computed yet
    num_known: int = 0  # cached in the prefill worker's pool
    num_restored: int = 0  # copied back from host memory
    restoring: float = 0.0  # restoring time, as tokens computed meanwhile
    num_taken: int = 0  # taken from a decode worker's pool
    num_computed: int = 0  # all other prompt tokens
    num_moved: int = 0  # `num_taken`, and tokens without KV in the decode worker's pool
    moving: float = 0.0  # cost of moving these
    load: float = 0.0  # of the decode worker; 1 is full

    @property
    def num_expected(self) -> int:
        """Prompt tokens expected not to be computed."""
        return self.num_known + self.num_restored + self.num_taken

    @property
    def num_handed_over(self) -> int:
        """Prompt tokens that move from the prefill worker's pool to the decode worker's."""
        return self.num_moved - self.num_taken

    @property
    def total(self) -> float:
        """The whole cost, as tokens computed in an equal time."""
        return self.total_behind(self.num_waiting)

    def total_behind(self, num_waiting: int) -> float:
        """Return the whole cost if so many tokens wait at the prefill worker."""
        prompt = num_waiting + self.num_computed + self.restoring
        return prompt + self.moving + LOAD_TOKENS * self.load

    def __str__(self) -> str:
        load = f"decode {self.load:.0%} full"
        restored = f"{self.num_restored} to restore, " if self.num_restored else ""
        return f"{self.num_computed} to compute behind {self.num_waiting}, {restored}{self.num_moved} to move, {load}"


FREE = Cost()


@dataclass(frozen=True, slots=True)
class Route:
    """A pair of workers: the prefill worker and the decode worker, perhaps a single worker in both places."""

    prefill: Member
    decode: Member
    expected_blocks: Counts  # at the decode worker
    overtakes: bool = False  # sent ahead of its turn
    cost: Cost = FREE
    num_pairs: int = 1  # candidates with room; this pair is the cheapest
    holder: Member | None = None  # decode worker with more of the prompt in its pool
    num_wasted: int = 0  # computed tokens that a full worker would not have to compute
    saved: str = ""  # why the decode worker computes the prompt, despite prefill workers

    @property
    def is_local(self) -> bool:
        return self.prefill is self.decode

    @property
    def workers(self) -> set[Member]:
        return {self.prefill, self.decode}

    @property
    def most_tokens(self) -> int:
        """Prompt tokens that the worker may compute at most; 0 is no limit."""
        return self.prefill.ready.short_prompt_tokens if self.saved else 0

    @property
    def reason(self) -> str:
        """Reason for the choice of these workers."""
        if self.saved:
            return f"decoded where it is computed: {self.saved}"
        best = f"the best of {self.num_pairs}: {self.cost}" if self.num_pairs > 1 else "the only pair with room"
        alone = "decoded where it is computed, " if self.is_local else ""
        num_taken = self.cost.num_taken
        taken = f"{num_taken} tokens taken from {self.holder.id}, " if self.holder and num_taken else ""
        return f"{alone}{'ahead of its turn, ' if self.overtakes else ''}{taken}{best}"

    def __str__(self) -> str:
        return f"{self.prefill.id} -> {self.decode.id}, {self.reason}"
