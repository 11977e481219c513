"""A prompt on its way through this worker."""

import time
from collections.abc import MutableSequence
from dataclasses import dataclass, field

import numpy as np

from common.device.steps.loop_trace import Trace
from common.grammar.follower import Follower
from common.kv.tables import Tables
from common.serving.prompts.inquiry import Key
from common.serving.prompts.prefixes import Beginning
from common.wire.messages.worker import PrefillRequest
from common.wire.values.output_token import OutputToken
from common.wire.values.packing import unpack_array
from common.wire.values.sampling_params import SamplingParams


@dataclass(slots=True, eq=False)
class PromptSequence:
    """What is known of one request; `token_ids` is the prompt and, on a replay, its outputs so far."""

    request_id: str
    attempt: int
    token_ids: MutableSequence[int]
    num_outputs: int
    sampling: SamplingParams
    decode_worker_id: str
    decode_epoch: int
    priority: int = 0  # lower is earlier
    turn: int = 0  # its place among prompts of one priority
    num_prompt_logprobs: int = 0  # of each prompt token
    first_scored: int = 0  # position from which on they are wanted
    whole_gpu: bool = False  # the router lets it take more than the share of prompts
    num_scheduled_tokens: int = 0  # computed by the steps launched so far
    num_in_flight: int = 0  # launched steps that are not over and write the blocks
    tables: Tables = ()
    was_announced: bool = False  # the decode worker may be pulling its blocks already
    ended: bool = False  # failed or aborted: the token that a step in flight still yields is dropped
    follower: Follower | None = None  # of its grammar, if it is under one
    mask: np.ndarray | None = None  # what its grammar lets follow the prompt, once that is known
    unsent: OutputToken | None = None  # the token after the prompt, until its grammar has taken it
    beginning: Beginning = field(default_factory=Beginning)
    arrived_s: float = 0.0  # on `time.monotonic`, until its first step
    holder: tuple[str, int] | None = None  # a decode worker in whose pool more may be, until that was tried

    @staticmethod
    def of(request: PrefillRequest) -> "PromptSequence":
        return PromptSequence(
            request_id=request.request_id,
            attempt=request.attempt,
            token_ids=unpack_array(request.token_ids),
            num_outputs=request.num_outputs,
            sampling=request.sampling,
            decode_worker_id=request.decode_worker_id,
            decode_epoch=request.decode_epoch,
            priority=request.priority,
            turn=request.turn,
            num_prompt_logprobs=request.num_prompt_logprobs,
            first_scored=request.first_scored,
            whole_gpu=request.whole_gpu,
            arrived_s=time.monotonic(),
            holder=(request.holder_worker_id, request.holder_epoch) if request.holder_worker_id else None,
        )

    def tell_launch(self, trace: Trace) -> None:
        """It is in the next step; the first ends its wait."""
        if self.arrived_s:
            trace.stretch("wait", self.key, self.arrived_s, time.monotonic())
            self.arrived_s = 0.0
        trace.join([self.key])

    @property
    def key(self) -> Key:
        return (self.request_id, self.attempt)

    @property
    def may_go_on(self) -> bool:
        """Whether outputs may follow the one that ends the prompt."""
        return self.num_outputs + 1 < self.sampling.max_tokens

    @property
    def num_slots(self) -> int:
        """Tokens that it gets blocks for: also the first output, if others may follow, so that it can be decoded."""
        return len(self.token_ids) + self.may_go_on

    @property
    def num_left(self) -> int:
        """Prompt tokens that no launched step computes."""
        return len(self.token_ids) - self.num_scheduled_tokens

    @property
    def awaits_mask(self) -> bool:
        """Whether it is not known yet what its grammar lets follow."""
        return self.follower is not None and self.mask is None

    @property
    def has_blocks(self) -> bool:
        """Its blocks are granted."""
        return self.beginning.grant is not None

    @property
    def is_started(self) -> bool:
        """Admitted: it has blocks for its whole prompt."""
        return bool(self.tables)
