"""What a completion asks of workers, and the pair that it is sent to."""

from dataclasses import dataclass
from typing import NamedTuple

from common.wire.values.kv_layout import Counts, KVLayout
from router.placement.member import Member
from router.placement.text_keys import TextKeys

FORESEEN_TOKENS = 1024
"""Outputs that a sequence is expected to have at most: few come near their max_tokens. Of those that grow on, workers
tell by the blocks that they have left."""
MOVED_AT_ONCE = 4
"""Tokens whose KV is moved to another pool, that count as much as one to compute. A copy takes less, but what is moved
lies in two pools then, and others have less room."""
LOAD_TOKENS = 32_768
"""What a decode worker that is full counts as, and one that is half full as half of it."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What a completion asks of the pair that takes it."""

    num_tokens: int  # prompt and outputs so far: computed as a prompt
    max_total_tokens: int  # prompt and the most outputs it may have
    avoided: Member | None = None  # gave it back: anybody else is better
    is_trial: bool = False  # it wants workers without anything unproven
    texts: tuple[TextKeys, ...] = ()  # by which it is known what of it lies where; none while that makes no difference
    takes_trip: bool = False  # it is computed by a prefill worker, if there is one

    @property
    def expected_tokens(self) -> int:
        """That it is expected to have at its end."""
        return min(self.max_total_tokens, self.num_tokens + FORESEEN_TOKENS)

    def text_in(self, layout: KVLayout) -> TextKeys | None:
        """Its keys in that layout, if they are made."""
        return next((text for text in self.texts if text.layout == layout), None)

    def covers(self, other: "Demand") -> bool:
        """Whether nobody takes this who does not take the other."""
        return (
            self.num_tokens >= other.num_tokens
            and self.max_total_tokens >= other.max_total_tokens
            and self.is_trial >= other.is_trial
            and self.takes_trip >= other.takes_trip
        )


LEAST = Demand(num_tokens=1, max_total_tokens=1, takes_trip=True)
"""Asks for nothing but a free place."""


class Cost(NamedTuple):
    """Of a request at a pair."""

    num_waiting: int = 0  # tokens that the prefill worker was sent before, and has not computed
    num_known: int = 0  # of its prompt that are there
    num_restored: int = 0  # of its prompt that are in host memory, and copied back
    restoring: float = 0.0  # that could be computed while this is done
    num_taken: int = 0  # of its prompt that are not, and that it takes from the pool of a decode worker
    num_computed: int = 0  # the others
    num_moved: int = 0  # that it takes, and those of the prompt whose KV is not in the decode worker's pool
    load: float = 0.0  # of the decode worker

    @property
    def num_expected(self) -> int:
        """Of its prompt, tokens that are not computed."""
        return self.num_known + self.num_restored + self.num_taken

    @property
    def total(self) -> float:
        """As many tokens to compute take as long."""
        prompt = self.num_waiting + self.num_computed + self.restoring
        return prompt + self.num_moved / MOVED_AT_ONCE + LOAD_TOKENS * self.load

    def __str__(self) -> str:
        load = f"decode {self.load:.0%} full"
        restored = f"{self.num_restored} to restore, " if self.num_restored else ""
        return f"{self.num_computed} to compute behind {self.num_waiting}, {restored}{self.num_moved} to move, {load}"


FREE = Cost()


@dataclass(frozen=True, slots=True)
class Route:
    """Who computes the prompt and who decodes; the same worker when it does both."""

    prefill: Member
    decode: Member
    expected_blocks: Counts  # at the decode worker
    overtakes: bool = False  # sent ahead of its turn
    cost: Cost = FREE
    num_pairs: int = 1  # that had room, of which this costs least
    holder: Member | None = None  # a decode worker in whose pool there is more of the prompt
    num_wasted: int = 0  # tokens that are computed, and would not be where there is no room now
    saved: str = ""  # by computing it where it is decoded, although there are prefill workers

    @property
    def is_local(self) -> bool:
        return self.prefill is self.decode

    @property
    def workers(self) -> set[Member]:
        return {self.prefill, self.decode}

    @property
    def most_tokens(self) -> int:
        """That are computed of it there; 0: all."""
        return self.prefill.ready.short_prompt_tokens if self.saved else 0

    @property
    def reason(self) -> str:
        """Why these workers."""
        if self.saved:
            return f"decoded where it is computed: {self.saved}"
        best = f"the best of {self.num_pairs}: {self.cost}" if self.num_pairs > 1 else "the only pair with room"
        alone = "decoded where it is computed, " if self.is_local else ""
        num_taken = self.cost.num_taken
        taken = f"{num_taken} tokens taken from {self.holder.id}, " if self.holder and num_taken else ""
        return f"{alone}{'ahead of its turn, ' if self.overtakes else ''}{taken}{best}"

    def __str__(self) -> str:
        return f"{self.prefill.id} -> {self.decode.id}, {self.reason}"
