"""State of a prompt in the prefill worker."""

from collections.abc import MutableSequence
from dataclasses import dataclass, field

import numpy as np

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
    """A request here; `token_ids` is the prompt and, on a replay, the outputs so far."""

    request_id: str
    attempt: int
    token_ids: MutableSequence[int]
    num_outputs: int
    sampling: SamplingParams
    decode_worker_id: str
    decode_epoch: int
    priority: int = 0  # lower is earlier
    turn: int = 0  # order inside a priority
    num_prompt_logprobs: int = 0  # entries per prompt token
    first_scored: int = 0  # first prompt position with log-probabilities
    whole_gpu: bool = False  # may exceed the prompts' share of the GPU
    num_scheduled_tokens: int = 0  # computed by launched steps, or found
    num_in_flight: int = 0  # unfinished launched steps, which write the blocks
    tables: Tables = ()
    was_announced: bool = False  # the decode worker may be pulling blocks already
    ended: bool = False  # failed or aborted: tokens of steps in flight are dropped
    follower: Follower | None = None  # None without a grammar
    mask: np.ndarray | None = None  # allowed first tokens, once known
    unsent: OutputToken | None = None  # first token, held back for the grammar
    beginning: Beginning = field(default_factory=Beginning)
    holder: tuple[str, int] | None = None  # decode worker with more blocks, until a retrieval was tried

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
            holder=(request.holder_worker_id, request.holder_epoch) if request.holder_worker_id else None,
        )

    @property
    def key(self) -> Key:
        return (self.request_id, self.attempt)

    @property
    def may_go_on(self) -> bool:
        """Tell whether outputs may follow the first token."""
        return self.num_outputs + 1 < self.sampling.max_tokens

    @property
    def num_slots(self) -> int:
        """Tokens with a place in blocks: the prompt, and the first output if decode follows."""
        return len(self.token_ids) + self.may_go_on

    @property
    def num_left(self) -> int:
        """Prompt tokens not in any launched step."""
        return len(self.token_ids) - self.num_scheduled_tokens

    @property
    def awaits_mask(self) -> bool:
        """Tell whether the grammar's mask is still missing."""
        return self.follower is not None and self.mask is None

    @property
    def has_blocks(self) -> bool:
        """Tell whether blocks are granted."""
        return self.beginning.grant is not None

    @property
    def is_started(self) -> bool:
        """Tell whether the prompt is admitted, with blocks for the whole prompt."""
        return bool(self.tables)
