"""Every message that crosses a process boundary; the first line of each docstring is its arrow.

Here are those of the router; what workers say to one another is in `handoff_messages`, what they and the owner of
their memory say in `memory_messages`, what that tells the router in `memory_reports`.

On the wire a message is a positional msgpack array `[WIRE_VERSION, tag, *fields]` (see `frames`).
The version follows from the messages themselves. Tags are never reused, token ids and block ids travel as int32
bytes (`packing`), and nothing is pickled. The type of a field says what it may hold (`fields`),
`relations` how fields depend on one another: what is otherwise never leaves `frames.decode`.

Identity. A worker makes a new `epoch` at each start and puts it into everything it says; a request
has a server-made `request_id` and an `attempt` that grows with each replay. What a dead incarnation
or a superseded attempt says is dropped by its receiver.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated

from common.base.errors import ErrorCode
from common.wire.messages.handoff import DecodeRequest, KVPathResult, KVPoolExport, KVProgress
from common.wire.messages.memory import MemoryMessage
from common.wire.messages.memory_reports import MemoryReport
from common.wire.messages.operator import OperatorMessage
from common.wire.values.fields import (
    MAX_ROWS,
    ClientId,
    Codes,
    Column,
    Count,
    Epoch,
    Label,
    Length,
    NumLogprobs,
    OptionalDigest,
    OptionalId,
    OptionalLabel,
    Positive,
    Priority,
    ProcessId,
    Rate,
    RequestId,
    RequestIds,
    ScoredIds,
    Scores,
    Seconds,
    Text,
    TokenIds,
    Total,
    Turn,
    WorkerId,
)
from common.wire.values.kv_layout import KVLayout, NumWanted
from common.wire.values.role import Role as Role
from common.wire.values.sampling_params import SamplingParams
from common.wire.values.step_counts import PullCounts, StepCounts


class FinishReason(IntEnum):
    NOT_FINISHED = 0
    STOP = 1
    LENGTH = 2


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """worker -> router: register; sent again whenever the router asks with `Reregister`."""

    worker_id: WorkerId
    epoch: Epoch
    role: Role
    pid: ProcessId
    version: Label  # of Baton
    device: Label  # "cpu", or "cuda:0 NVIDIA H200 GPU-<uuid>"
    model_name: Label
    model_fingerprint: Label
    tokenizer_fingerprint: Label
    kv_layout: KVLayout
    num_blocks: NumWanted  # that can be had at most
    max_model_len: Positive  # tokens
    max_batch_tokens: Count  # prefill: token budget of a step; decode: 0
    max_num_seqs: Positive  # prefill: prompts of a step; decode: rows of the batch
    transport: Label  # "cuda_ipc" or "shm"; "none" when the worker must not hand off
    handoff_endpoint: OptionalLabel  # where prefill workers dial a decode worker; "" for prefill
    standby: Count  # others of its role on its device that are enough without it; 0: it is no standby
    memory_server_id: OptionalId  # whose word of this worker's end counts; "" without a memory server
    memory_server_epoch: Epoch
    pool_id: Epoch  # that it has blocks of; who has the same one hands over without copying
    prefix_min_tokens: Count  # of a prompt, for it to be looked up there; MAX_INT32 if none is
    takes_replies: bool  # prefill: from decode workers' pools, where it has a path to them
    short_prompt_tokens: Count  # decode: of a prompt, that it computes although there are prefill workers; 0: none


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """worker -> router, from a thread of its own: alive, how busy, and since when without a step."""

    worker_id: WorkerId
    epoch: Epoch
    num_waiting: Count
    num_running: Count
    num_paused: Count  # decode: of those, without a row, as others have it
    num_free_blocks: NumWanted
    num_handoffs: Count  # prefill: blocks kept for a peer; decode: handoffs waiting, being pulled, or begun ahead
    last_step_age_s: Seconds  # 0 while idle
    num_dropped_frames: Count
    num_pulled_blocks: Total  # from other pools since the start: decode: of prompts, prefill: of replies
    num_found_blocks: Total  # decode: of prompts from other pools, those that did not need to be pulled
    spared_bytes: Total  # decode: of KV that steps did not read since the start, as rows share it
    steps: StepCounts
    pulls: PullCounts
    prompt_block_us: Count  # what computing a block of a prompt takes, as it reckons when it asks for what is there
    taking_us: Count  # prefill: what taking blocks from another pool takes beside the copy, as it reckons then
    short_prompt_us: Count  # decode: what computing one takes, from its launch on; 0 where that is not known


@dataclass(frozen=True, slots=True)
class WorkerLeaving:
    """worker -> router: send nothing new; what is in flight is being finished. Answered by `StillBound`."""

    worker_id: WorkerId
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class WorkerGone:
    """worker -> router: this process is ending, drained or by an error; what it still had is lost."""

    worker_id: WorkerId
    epoch: Epoch
    reason: Text


SHARED_POOL = "shared pool"
"""The transport of a path whose ends share a pool: blocks change hands, and nothing is copied."""


@dataclass(frozen=True, slots=True)
class KVPathReport:
    """decode worker -> router: the way blocks travel from one prefill worker has been tried."""

    worker_id: WorkerId
    epoch: Epoch
    prefill_worker_id: WorkerId
    prefill_epoch: Epoch
    transport: Label
    gb_per_s: Rate  # 0 when the path failed, or nothing is copied
    error: Text  # "" when the path works


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """worker -> router: one step's tokens, as columns of equal length.

    `output_indices` counts a request's output tokens from 0. The first comes from the prefill
    worker and the rest from the decode worker, and no order holds between two sockets: the
    router puts them in order by index.
    """

    worker_id: WorkerId
    epoch: Epoch
    request_ids: RequestIds
    attempts: Column
    output_indices: Column
    token_ids: Column
    finish_reasons: Annotated[bytes, Codes(FinishReason, MAX_ROWS)]


@dataclass(frozen=True, slots=True)
class LogprobBatch(TokenBatch):
    """worker -> router: one step's tokens, of some of which log-probabilities were asked for.

    Each token has `num_logprobs` entries of `logprob_ids` and `logprobs`: none, or its own and those of the likeliest
    (see `output_token.Logprobs`).
    """

    num_logprobs: Column
    logprob_ids: ScoredIds
    logprobs: Scores


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """worker -> router: how likely the tokens of a prompt from `first_position` on were.

    Each has a rank, 1 for the likeliest, and `num_logprobs` entries of `logprob_ids` and `logprobs`: its own and those
    of the likeliest. A prompt takes as many of these messages as it needs, in the order of positions; its first output
    comes behind them on the same connection.
    """

    worker_id: WorkerId
    epoch: Epoch
    request_id: RequestId
    attempt: Count
    first_position: Positive
    ranks: Column
    num_logprobs: Column
    logprob_ids: ScoredIds
    logprobs: Scores


@dataclass(frozen=True, slots=True)
class PromptCached:
    """worker -> router: of a prompt's first tokens so many are there and need not be computed.

    Again when more are; it comes before the prompt's first output, and not at all if there are none.
    """

    worker_id: WorkerId
    epoch: Epoch
    request_id: RequestId
    attempt: Count
    num_tokens: Positive


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """worker -> router: this attempt ended without finishing; the worker keeps nothing of it."""

    worker_id: WorkerId
    epoch: Epoch
    request_id: RequestId
    attempt: Count
    code: ErrorCode
    message: Text


@dataclass(frozen=True, slots=True)
class InquiryReply:
    """worker -> router: which attempts of an `Inquiry` it has; another it will never have, nor say more of it."""

    worker_id: WorkerId
    epoch: Epoch
    request_ids: RequestIds
    attempts: Column
    are_here: Annotated[bytes, Length(0, MAX_ROWS)]  # a byte each, 0 for what it does not have


@dataclass(frozen=True, slots=True)
class Welcome:
    """router -> worker, memory server: registered. A new `router_epoch` means requests of an older one are void."""

    router_epoch: Epoch


@dataclass(frozen=True, slots=True)
class Refused:
    """router -> worker, memory server: not registered, and why. A worker exits, a memory server says no more."""

    reason: Text


@dataclass(frozen=True, slots=True)
class Reregister:
    """router -> worker, memory server: a heartbeat came from somebody unknown; register again."""

    router_epoch: Epoch


@dataclass(frozen=True, slots=True)
class StillBound:
    """router -> worker: answers `WorkerLeaving`: so many requests need it; a router that ends says 0 to everyone."""

    num_requests: Count


@dataclass(frozen=True, slots=True)
class Knock:
    """router -> worker, memory server: nothing. That it can be sent says that the process is there."""

    router_epoch: Epoch


@dataclass(frozen=True, slots=True)
class KVEventsWanted:
    """router -> memory server: tell which blocks of that pool there are, and from then on what becomes of them."""

    pool_id: Epoch


@dataclass(frozen=True, slots=True)
class DecodePeer:
    """router -> prefill worker: a decode worker exists; dial it and offer the KV pool."""

    worker_id: WorkerId
    epoch: Epoch
    handoff_endpoint: OptionalLabel


@dataclass(frozen=True, slots=True)
class PeerGone:
    """router -> worker: that incarnation is dead; release what was kept for it."""

    worker_id: WorkerId
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class PrefillRequest:
    """router -> prefill worker, or -> decode worker when the prompt is to be computed there.

    On a replay `token_ids` is the prompt followed by the `num_outputs` tokens already produced;
    `sampling.max_tokens` always counts from the first output.
    """

    request_id: RequestId
    attempt: Count
    token_ids: TokenIds
    num_outputs: Count
    sampling: SamplingParams
    decode_worker_id: WorkerId
    decode_epoch: Epoch
    whole_gpu: bool  # it may be computed with all of the GPU, whatever decode steps there lose by it
    priority: Priority  # lower is earlier, before everything else
    turn: Turn  # its place among prompts of one priority, lower is earlier; see `router.dispatch.waiting_queue`
    client: ClientId  # between whom decode rows are shared; 0: clients that do not say who they are
    num_prompt_logprobs: NumLogprobs  # of each prompt token, its own and those of the likeliest
    first_scored: Count  # position from which on they are wanted: the router has those before
    salt: OptionalDigest  # it shares blocks with prompts of the same one alone, see `block_key`
    holder_worker_id: OptionalId  # a decode worker whose pool may have more of it, as of a reply; "" for none
    holder_epoch: Epoch
    most_tokens: Count  # decode worker: if more of them are to be computed it gives the prompt back; 0: it computes all


@dataclass(frozen=True, slots=True)
class Abort:
    """router -> prefill and decode worker: let go of every attempt up to this one; idempotent."""

    request_id: RequestId
    attempt: Count


@dataclass(frozen=True, slots=True)
class Inquiry:
    """router -> worker: do you have these attempts? Answered after all that was sent before."""

    request_ids: RequestIds
    attempts: Column


WorkerMessage = (
    WorkerReady | Heartbeat | WorkerLeaving | WorkerGone | KVPathReport | TokenBatch | LogprobBatch | PromptLogprobs
    | PromptCached | RequestFailed | InquiryReply | Welcome | Refused | Reregister | DecodePeer | PeerGone
    | PrefillRequest | DecodeRequest | Abort | Inquiry | StillBound | Knock | KVEventsWanted
    | KVPoolExport | KVProgress | KVPathResult
)  # fmt: skip
"""What workers hear or say, but for their memory server."""

Message = WorkerMessage | MemoryMessage | MemoryReport | OperatorMessage
