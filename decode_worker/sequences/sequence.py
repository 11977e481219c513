"""A request being decoded here."""

import time
from collections.abc import MutableSequence
from dataclasses import dataclass

import numpy as np

from common.device.steps.loop_trace import Trace
from common.grammar.follower import Follower
from common.kv.tables import Tables
from common.wire.values.output_token import OutputToken
from common.wire.values.sampling_params import SamplingParams

Key = tuple[str, int]
"""(request_id, attempt)."""
MAX_LATE = 4
"""Steps in a row that may compute a row in vain."""


@dataclass(slots=True, eq=False)
class DecodeSequence:
    """What is known of one request.

    `token_ids` is the prompt and every output collected so far. `num_scheduled` also counts the
    tokens of steps that are launched and not collected: the GPU may be a step ahead of what we
    know. KV of all scheduled tokens but the last is written by the steps launched so far.
    """

    request_id: str
    attempt: int
    token_ids: MutableSequence[int]
    num_outputs: int
    sampling: SamplingParams
    tables: Tables = ()
    num_slots: int = 0  # tokens that these have places for
    num_scheduled: int = 0
    num_in_flight: int = 0  # launched steps that are not collected and touch the blocks
    row: int = -1  # of the batch; -1 when not in it
    num_prompt_logprobs: int = 0  # of each prompt token, where the prompt is computed here
    first_scored: int = 0  # position from which on they are wanted
    ended: bool = False  # finished, failed or aborted: what steps in flight still yield is dropped
    follower: Follower | None = None  # of its grammar, if it is under one
    mask: np.ndarray | None = None  # what its grammar lets follow the tokens, once that is known
    mask_position: int = -1  # of the last mask that steps find
    place: int = -1  # where they find it, see `guides`
    num_late: int = 0  # steps in a row that did not find its mask
    unsent: OutputToken | None = None  # the last token, until its grammar has taken it
    priority: int = 0  # lower is earlier, before everything else
    client: int = 0  # between whom rows are shared
    is_paused: bool = False  # another sequence has its row; its blocks stay its own
    offered_s: float = 0.0  # its prompt was handed over, on `time.monotonic`
    claimed_s: float = 0.0  # the pull of it began
    num_sealed: int = 0  # blocks from the first on that nobody writes any more, and others find
    digest: bytes = b""  # of the last of them; b"" if nothing is sealed

    def __post_init__(self) -> None:
        self.num_scheduled = len(self.token_ids)

    @property
    def key(self) -> Key:
        return (self.request_id, self.attempt)

    def handed_over(self, token_id: int) -> None:
        """Take the token that a prefill worker sampled after the prompt; decoding goes on behind it."""
        self.token_ids.append(token_id)
        self.num_outputs += 1
        self.num_scheduled = len(self.token_ids)
        self.offered_s = time.monotonic()

    def tell_arrival(self, trace: Trace) -> None:
        """It waited for room since its offer, was pulled if it was in another pool, and is in the next step."""
        now_s = time.monotonic()
        trace.stretch("handoff", self.key, self.offered_s, self.claimed_s or now_s)
        if self.claimed_s:
            trace.stretch("pull", self.key, self.claimed_s, now_s)
        trace.join([self.key])

    @property
    def max_total_tokens(self) -> int:
        """Prompt plus the most outputs it may have."""
        return len(self.token_ids) - self.num_outputs + self.sampling.max_tokens

    @property
    def num_prompt_slots(self) -> int:
        """Tokens that a prompt computed here gets blocks for: also the first output, if others may follow."""
        return len(self.token_ids) + (len(self.token_ids) + 1 < self.max_total_tokens)

    @property
    def wants_step(self) -> bool:
        """Whether another token may be scheduled."""
        return not self.ended and self.num_scheduled < self.max_total_tokens

    @property
    def awaits_mask(self) -> bool:
        """Whether it is not known yet what its grammar lets follow."""
        return self.follower is not None and self.mask is None

    @property
    def sits_out(self) -> bool:
        """Whether steps do without it, because its grammar is slow, until its mask is there."""
        return self.awaits_mask and self.num_late >= MAX_LATE

    @property
    def has_mask(self) -> bool:
        """Whether the next step surely finds what it needs of its grammar; while one is in flight nobody knows."""
        return self.follower is None or self.mask_position == self.num_scheduled
