"""Messages between the router and others; the first line of each message's docstring is its arrow.

Other messages: `handoff` among workers; `memory` between a worker and a memory server. `memory_reports` go from a
memory server to the router, `operator` messages between an operator and the router.

On the wire a message is a positional msgpack array `[WIRE_VERSION, tag, *fields]` (see `frames`). The version follows
from the definitions of all messages. Tags are never reused. Token ids and block ids travel as int32 bytes (`packing`),
and nothing is pickled. A type limits a field (`fields`), `relations` relates fields; `frames.decode` refuses all else.

Identity. A worker makes a new `epoch` at each start and puts the epoch into every message. A request has a
router-made `request_id`, and an `attempt` that grows with each replay. Receivers drop messages from a dead incarnation
or about a superseded attempt.
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
    version: Label  # Baton's
    device: Label  # "cpu", or "cuda:0 NVIDIA H200 GPU-<uuid>"
    model_name: Label
    model_fingerprint: Label
    tokenizer_fingerprint: Label
    kv_layout: KVLayout
    num_blocks: NumWanted  # most leasable blocks
    max_model_len: Positive  # tokens
    max_batch_tokens: Count  # prefill: token budget of a step; decode: 0
    max_num_seqs: Positive  # prefill: prompts of a step; decode: rows of the batch
    transport: Label  # "cuda_ipc" or "shm"; "none" when the worker must not hand off
    handoff_endpoint: OptionalLabel  # decode: dialed by prefill workers; prefill: ""
    standby: Count  # number of peers on the device enough without the worker; 0: no standby
    memory_server_id: OptionalId  # may report the worker's end; "" without a memory server
    memory_server_epoch: Epoch
    pool_id: Epoch  # workers of equal pools hand over without copying
    prefix_min_tokens: Count  # shortest prompt with a prefix lookup; MAX_INT32: no lookups
    takes_replies: bool  # prefill: pulls replies' blocks from decode workers' pools
    short_prompt_tokens: Count  # decode: longest prompt computed here despite prefill workers; 0: none


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """worker -> router, from a separate thread: alive, load, and age of the last step."""

    worker_id: WorkerId
    epoch: Epoch
    num_waiting: Count
    num_running: Count
    num_paused: Count  # decode: running sequences without a row
    num_free_blocks: NumWanted
    num_handoffs: Count  # prefill: offers not received; decode: waiting, being pulled, or begun ahead
    last_step_age_s: Seconds  # 0 while idle
    num_dropped_frames: Count
    num_pulled_blocks: Total  # from other pools since the start: decode: of prompts, prefill: of replies
    num_found_blocks: Total  # decode: offered blocks found in the own pool, not pulled
    spared_bytes: Total  # decode: KV not read by steps since the start, because rows share prefixes
    steps: StepCounts
    pulls: PullCounts
    prompt_block_us: Count  # estimate: computing a block of a prompt, in microseconds
    taking_us: Count  # prefill: estimate: overhead of a pull beside the copy, in microseconds
    short_prompt_us: Count  # decode: a short prompt from launch to end, in microseconds; 0: unknown


@dataclass(frozen=True, slots=True)
class WorkerLeaving:
    """worker -> router: send no new requests; requests in flight are being finished. Answered by `StillBound`."""

    worker_id: WorkerId
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class WorkerGone:
    """worker -> router: the process is ending, drained or by an error; remaining requests are lost."""

    worker_id: WorkerId
    epoch: Epoch
    reason: Text


SHARED_POOL = "shared pool"
"""Transport of a path inside a single pool: blocks change owner without a copy."""


@dataclass(frozen=True, slots=True)
class KVPathReport:
    """decode worker -> router: result of a test of the KV path from a prefill worker."""

    worker_id: WorkerId
    epoch: Epoch
    prefill_worker_id: WorkerId
    prefill_epoch: Epoch
    transport: Label
    gb_per_s: Rate  # 0: the path failed, or needs no copy
    error: Text  # "" when the path works


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """worker -> router: tokens of a step, as columns of equal length.

    `output_indices` counts a request's output tokens from 0. The first token comes from the prefill worker and the rest
    from the decode worker. The router orders tokens by index, because no order holds between two sockets.
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
    """worker -> router: tokens of a step, some with log-probabilities.

    Each token has `num_logprobs` entries of `logprob_ids` and `logprobs`: none, or the token's own and then the
    likeliest tokens' (see `output_token.Logprobs`).
    """

    num_logprobs: Column
    logprob_ids: ScoredIds
    logprobs: Scores


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """worker -> router: log-probabilities of a prompt's tokens from `first_position` on.

    Each token has a rank, 1 for the likeliest, and `num_logprobs` entries of `logprob_ids` and `logprobs`: the token's
    own and then the likeliest tokens'. A prompt may need several messages, in the order of positions. The first output
    follows on the same connection.
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
    """worker -> router: the first `num_tokens` tokens of a prompt are cached and need no computation.

    Sent again when the number grows, always before the prompt's first output; never sent for 0 tokens.
    """

    worker_id: WorkerId
    epoch: Epoch
    request_id: RequestId
    attempt: Count
    num_tokens: Positive


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """worker -> router: an attempt ended without finishing; the worker keeps nothing of the attempt."""

    worker_id: WorkerId
    epoch: Epoch
    request_id: RequestId
    attempt: Count
    code: ErrorCode
    message: Text


@dataclass(frozen=True, slots=True)
class InquiryReply:
    """worker -> router: attempts of an `Inquiry` owned by the worker; about any other attempt no message follows."""

    worker_id: WorkerId
    epoch: Epoch
    request_ids: RequestIds
    attempts: Column
    are_here: Annotated[bytes, Length(0, MAX_ROWS)]  # a byte per attempt, 0: not owned


@dataclass(frozen=True, slots=True)
class Welcome:
    """router -> worker, memory server: registered. A new `router_epoch` voids requests of older epochs."""

    router_epoch: Epoch


@dataclass(frozen=True, slots=True)
class Refused:
    """router -> worker, memory server: not registered. A worker exits, a memory server stops reporting."""

    reason: Text


@dataclass(frozen=True, slots=True)
class Reregister:
    """router -> worker, memory server: a heartbeat came from an unknown sender; register again."""

    router_epoch: Epoch


@dataclass(frozen=True, slots=True)
class StillBound:
    """router -> worker: answer to `WorkerLeaving`, with the number of requests still bound to the worker.

    An ending router sends 0 to every worker.
    """

    num_requests: Count


@dataclass(frozen=True, slots=True)
class Knock:
    """router -> worker, memory server: no content. Successful sending shows a live process."""

    router_epoch: Epoch


@dataclass(frozen=True, slots=True)
class KVEventsWanted:
    """router -> memory server: report all blocks of a pool now, and their changes from then on (see `KVEvents`)."""

    pool_id: Epoch


@dataclass(frozen=True, slots=True)
class DecodePeer:
    """router -> prefill worker: a decode worker exists; dial it and offer the KV pool."""

    worker_id: WorkerId
    epoch: Epoch
    handoff_endpoint: OptionalLabel


@dataclass(frozen=True, slots=True)
class PeerGone:
    """router -> worker: a worker's incarnation is dead; release everything kept for the incarnation."""

    worker_id: WorkerId
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class PrefillRequest:
    """router -> prefill worker, or -> decode worker: compute a prompt.

    On a replay `token_ids` is the prompt followed by the `num_outputs` tokens already produced.
    `sampling.max_tokens` always counts from the first output.
    """

    request_id: RequestId
    attempt: Count
    token_ids: TokenIds
    num_outputs: Count
    sampling: SamplingParams
    decode_worker_id: WorkerId
    decode_epoch: Epoch
    whole_gpu: bool  # may use the whole GPU, at the expense of decode steps there
    priority: Priority  # lower is earlier, before `turn`
    turn: Turn  # order inside a priority, lower is earlier; see `waiting_queue`
    client: ClientId  # for a fair share of decode rows; 0: anonymous clients
    num_prompt_logprobs: NumLogprobs  # entries per prompt token, the token's own included
    first_scored: Count  # first prompt position with log-probabilities; the router has the earlier positions
    salt: OptionalDigest  # blocks are shared only under equal salts; see `block_key`
    holder_worker_id: OptionalId  # decode worker whose pool may hold a longer prefix; "" for none
    holder_epoch: Epoch
    most_tokens: Count  # decode worker: with more tokens to compute, return the prompt; 0: no limit


@dataclass(frozen=True, slots=True)
class Abort:
    """router -> prefill and decode worker: drop every attempt up to `attempt`; idempotent."""

    request_id: RequestId
    attempt: Count


@dataclass(frozen=True, slots=True)
class Inquiry:
    """router -> worker: ask for ownership of attempts; answered after all messages sent before."""

    request_ids: RequestIds
    attempts: Column


WorkerMessage = (
    WorkerReady | Heartbeat | WorkerLeaving | WorkerGone | KVPathReport | TokenBatch | LogprobBatch | PromptLogprobs
    | PromptCached | RequestFailed | InquiryReply | Welcome | Refused | Reregister | DecodePeer | PeerGone
    | PrefillRequest | DecodeRequest | Abort | Inquiry | StillBound | Knock | KVEventsWanted
    | KVPoolExport | KVProgress | KVPathResult
)  # fmt: skip
"""Messages of workers, except messages with a memory server."""

Message = WorkerMessage | MemoryMessage | MemoryReport | OperatorMessage
