"""A request being decoded here."""

import time
from collections import deque
from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass, field

from common.grammar.sequence_grammars import GrammarState
from common.kv.tables import Tables
from common.serving.prompts.requests import Key
from common.wire.messages.handoff import DecodeRequest
from common.wire.messages.worker import PrefillRequest
from common.wire.values.packing import unpack_array
from common.wire.values.sampling_params import SamplingParams

MAX_LATE = 4
"""Consecutive steps that may compute a row in vain."""


@dataclass(slots=True)
class SealedChain:
    """Chain of keys of a sequence's sealed blocks."""

    num_blocks: int = 0  # sealed, from the first on
    digest: bytes = b""  # of the last sealed block; b"": the sequence is not sealed
    latest: deque[bytes] = field(default_factory=deque)  # digests of the last blocks, as far as needed

    def add(self, digest: bytes, most_kept: int) -> None:
        """Append a block, and keep the digests of the last `most_kept` blocks."""
        self.digest = digest
        self.num_blocks += 1
        if most_kept:
            self.latest.append(digest)
            if len(self.latest) > most_kept:
                self.latest.popleft()


@dataclass(slots=True)
class MaskSlot:
    """Place of a sequence's masks in the memory read by steps (see `grammar_masks`)."""

    place: int = -1  # -1: none
    position: int = -1  # of the last published mask
    num_late: int = 0  # consecutive steps that missed the mask


@dataclass(slots=True, eq=False)
class DecodeSequence:
    """State of one completion and attempt.

    `token_ids` is the prompt and every output collected so far. `num_scheduled` also counts tokens of launched steps
    not yet collected, because the GPU may be a step ahead of the host. KV of all scheduled tokens but the last is
    written by the steps launched so far.
    """

    request: DecodeRequest | PrefillRequest
    token_ids: MutableSequence[int]
    num_outputs: int  # by all attempts
    tables: Tables = ()
    num_slots: int = 0  # tokens with a place in the tables
    num_scheduled: int = field(init=False)
    num_in_flight: int = 0  # launched, uncollected steps, which touch the blocks
    row: int = -1  # in the batch; -1: none
    is_paused: bool = False  # another sequence has the row; blocks are kept
    ended: bool = False  # finished, failed or aborted; later tokens are dropped
    grammar: GrammarState | None = None
    mask_slot: MaskSlot = field(default_factory=MaskSlot)
    chain: SealedChain = field(default_factory=SealedChain)
    snapshot_place: int = 0  # places behind which the spare states were copied; 0: no copy
    offered_s: float = 0.0  # time of the handoff, on `time.monotonic`

    def __post_init__(self) -> None:
        self.num_scheduled = len(self.token_ids)

    @classmethod
    def of(cls, request: DecodeRequest | PrefillRequest) -> "DecodeSequence":
        """Make the sequence of a request that has just arrived."""
        return cls(request, unpack_array(request.token_ids), request.num_outputs)

    @property
    def key(self) -> Key:
        return (self.request.request_id, self.request.attempt)

    @property
    def sampling(self) -> SamplingParams:
        return self.request.sampling

    @property
    def outputs(self) -> Sequence[int]:
        """Token ids of all outputs so far."""
        return self.token_ids[len(self.token_ids) - self.num_outputs :]

    def handed_over(self, token_id: int) -> None:
        """Append the token sampled by the prefill worker after the prompt; decoding goes on from there."""
        self.token_ids.append(token_id)
        self.num_outputs += 1
        self.num_scheduled = len(self.token_ids)
        self.offered_s = time.monotonic()

    @property
    def max_total_tokens(self) -> int:
        """Tokens of the prompt plus the most outputs allowed."""
        return len(self.token_ids) - self.num_outputs + self.request.sampling.max_tokens

    @property
    def wants_step(self) -> bool:
        """True if another token may be scheduled."""
        return not self.ended and self.num_scheduled < self.max_total_tokens

    @property
    def is_skipped(self) -> bool:
        """True while steps do without the sequence, because its grammar is slow."""
        return self.grammar is not None and self.grammar.mask is None and self.mask_slot.num_late >= MAX_LATE

    @property
    def has_mask(self) -> bool:
        """True if the next step surely finds the mask; unknown, so false, while a step is in flight."""
        return self.grammar is None or self.mask_slot.position == self.num_scheduled
