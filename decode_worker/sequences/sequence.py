"""A request being decoded here."""

import time
from collections.abc import MutableSequence
from dataclasses import dataclass

import numpy as np

from common.grammar.follower import Follower
from common.kv.tables import Tables
from common.wire.values.output_token import OutputToken
from common.wire.values.sampling_params import SamplingParams

Key = tuple[str, int]
"""(request_id, attempt)."""
MAX_LATE = 4
"""Consecutive steps that may compute a row in vain."""


def is_attempt(key: Key, request_id: str, attempt: int) -> bool:
    """Tell whether a key is an attempt of a request up to `attempt`."""
    return key[0] == request_id and key[1] <= attempt


@dataclass(slots=True, eq=False)
class DecodeSequence:
    """State of one completion and attempt.

    `token_ids` is the prompt and every output collected so far. `num_scheduled` also counts tokens of launched steps
    not yet collected, because the GPU may be a step ahead of the host. KV of all scheduled tokens but the last is
    written by the steps launched so far.
    """

    request_id: str
    attempt: int
    token_ids: MutableSequence[int]
    num_outputs: int
    sampling: SamplingParams
    tables: Tables = ()
    num_slots: int = 0  # tokens with a place in the tables
    num_scheduled: int = 0
    num_in_flight: int = 0  # launched, uncollected steps, which touch the blocks
    row: int = -1  # in the batch; -1: none
    ended: bool = False  # finished, failed or aborted; later tokens are dropped
    follower: Follower | None = None  # None: no grammar
    mask: np.ndarray | None = None  # tokens allowed next by the grammar, once known
    mask_position: int = -1  # position of the last published mask
    place: int = -1  # place of published masks, see `grammar_masks`
    num_late: int = 0  # consecutive steps that missed the mask
    unsent: OutputToken | None = None  # the last token, until accepted by the grammar
    priority: int = 0  # lower is earlier, before everything else
    client: int = 0  # rows are shared fairly among clients
    is_paused: bool = False  # another sequence has the row; blocks are kept
    offered_s: float = 0.0  # time of the handoff, on `time.monotonic`
    num_sealed: int = 0  # sealed blocks, from the first on
    digest: bytes = b""  # of the last sealed block; b"": the sequence is not sealed

    def __post_init__(self) -> None:
        self.num_scheduled = len(self.token_ids)

    @property
    def key(self) -> Key:
        return (self.request_id, self.attempt)

    def handed_over(self, token_id: int) -> None:
        """Append the token sampled by the prefill worker after the prompt; decoding goes on from there."""
        self.token_ids.append(token_id)
        self.num_outputs += 1
        self.num_scheduled = len(self.token_ids)
        self.offered_s = time.monotonic()

    @property
    def max_total_tokens(self) -> int:
        """Tokens of the prompt plus the most outputs allowed."""
        return len(self.token_ids) - self.num_outputs + self.sampling.max_tokens

    @property
    def num_prompt_slots(self) -> int:
        """Tokens with blocks while a prompt is computed here: includes the first output, if others may follow."""
        return len(self.token_ids) + (len(self.token_ids) + 1 < self.max_total_tokens)

    @property
    def wants_step(self) -> bool:
        """True if another token may be scheduled."""
        return not self.ended and self.num_scheduled < self.max_total_tokens

    @property
    def awaits_mask(self) -> bool:
        """True while the tokens allowed by the grammar are not known."""
        return self.follower is not None and self.mask is None

    @property
    def sits_out(self) -> bool:
        """True while steps do without the sequence, because its grammar is slow."""
        return self.awaits_mask and self.num_late >= MAX_LATE

    @property
    def has_mask(self) -> bool:
        """True if the next step surely finds the mask; unknown, so false, while a step is in flight."""
        return self.follower is None or self.mask_position == self.num_scheduled
