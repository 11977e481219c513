"""Messages between the router and others; the first line of each message's docstring is its arrow.

Other messages: `handoff` among workers; `memory` between a worker and a memory server. `memory_reports` go from a
memory server to the router, `operator` messages between an operator and the router. `fronts` go between a front and
the router that dispatches.

On the wire a message is positional msgpack, `[WIRE_VERSION, [tag, *fields]]` (see `frames`). The version follows from
the definitions of all messages. Tags are never renumbered, never reused. Token ids and block ids travel as int32 bytes
(`packing`), and nothing is pickled. A type limits a field (`fields`), and `contradiction` relates the fields of a
message; `frames.decode` refuses all else.

Identity. A worker makes a new `epoch` at each start and puts the epoch into every message. A request has a
router-made `request_id`, and an `attempt` that grows with each replay. Receivers drop messages from a dead incarnation
or about a superseded attempt.
"""

from common.base.errors import ErrorCode
from common.wire.messages.fronts import FrontMessage
from common.wire.messages.gates import GateMessage
from common.wire.messages.handoff import DecodeRequest, KVPathResult, KVPoolExport, KVProgress
from common.wire.messages.memory import MemoryMessage
from common.wire.messages.memory_reports import MemoryReport
from common.wire.messages.operator import OperatorMessage
from common.wire.messages.senders import FromWorker, OfAttempt
from common.wire.values.fields import (
    ClientId,
    Column,
    Count,
    Epoch,
    FinishReasons,
    Flags,
    Label,
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
    WireStruct,
    WorkerId,
)
from common.wire.values.kv_layout import KVLayout, NumWanted
from common.wire.values.output_token import FinishReason as FinishReason
from common.wire.values.packing import misscored, num_ids, uneven
from common.wire.values.role import Role as Role
from common.wire.values.sampling_params import SamplingParams
from common.wire.values.step_counts import PullCounts, StepCounts


class WorkerReady(FromWorker, tag=1):
    """worker -> router: register; sent again whenever the router asks with `Reregister`."""

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
    model_files: OptionalLabel = ""  # where they are, and how large; for messages

    def contradiction(self) -> str:
        if self.role is Role.PREFILL and not self.max_batch_tokens:
            return "a prefill worker without a budget of tokens"
        return self.kv_layout.problem(self.num_blocks)


class Heartbeat(FromWorker, tag=2):
    """worker -> router, from a separate thread: alive, load, and age of the last step."""

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
    num_turns: Total  # prefill: steps for which streams waited; decode: steps launched beside those
    in_turns: bool  # prefill: streams wait for prompts at present
    steps: StepCounts
    pulls: PullCounts
    prompt_block_us: Count  # estimate: computing a block of a prompt, in microseconds
    taking_us: Count  # prefill: estimate: overhead of a pull beside the copy, in microseconds
    short_prompt_us: Count  # decode: a short prompt from launch to end, in microseconds; 0: unknown


class WorkerLeaving(FromWorker, tag=3):
    """worker -> router: send no new requests; requests in flight are being finished. Answered by `StillBound`."""


class WorkerGone(FromWorker, tag=7):
    """worker -> router: the process is ending, drained or by an error; remaining requests are lost."""

    reason: Text


SHARED_POOL = "shared pool"
"""Transport of a path inside a single pool: blocks change owner without a copy."""


class KVPathReport(FromWorker, tag=4):
    """decode worker -> router: result of a test of the KV path from a prefill worker."""

    prefill_worker_id: WorkerId
    prefill_epoch: Epoch
    transport: Label
    gb_per_s: Rate  # 0: the path failed, or needs no copy
    error: Text  # "" when the path works


class TokenBatch(FromWorker, tag=5):
    """worker -> router: tokens of a step, as columns of equal length.

    `output_indices` counts a request's output tokens from 0. The first token comes from the prefill worker and the rest
    from the decode worker. The router orders tokens by index, because no order holds between two sockets.
    """

    request_ids: RequestIds
    attempts: Column
    output_indices: Column
    token_ids: Column
    finish_reasons: FinishReasons

    def contradiction(self) -> str:
        columns = map(num_ids, (self.attempts, self.output_indices, self.token_ids))
        return uneven(len(self.request_ids), len(self.finish_reasons), *columns)


class LogprobBatch(TokenBatch, tag=9):
    """worker -> router: tokens of a step, some with log-probabilities.

    Each token has `num_logprobs` entries of `logprob_ids` and `logprobs`: none, or the token's own and then the
    likeliest tokens' (see `output_token.Logprobs`).
    """

    num_logprobs: Column
    logprob_ids: ScoredIds
    logprobs: Scores

    def contradiction(self) -> str:
        problem = misscored(len(self.request_ids), self.num_logprobs, self.logprob_ids, self.logprobs)
        return TokenBatch.contradiction(self) or problem


class PromptLogprobs(FromWorker, tag=10):
    """worker -> router: log-probabilities of a prompt's tokens from `first_position` on.

    Each token has a rank, 1 for the likeliest, and `num_logprobs` entries of `logprob_ids` and `logprobs`: the token's
    own and then the likeliest tokens'. A prompt may need several messages, in the order of positions. The first output
    follows on the same connection.
    """

    request_id: RequestId
    attempt: Count
    first_position: Positive
    ranks: Column
    num_logprobs: Column
    logprob_ids: ScoredIds
    logprobs: Scores

    def contradiction(self) -> str:
        return misscored(num_ids(self.ranks), self.num_logprobs, self.logprob_ids, self.logprobs)


class PromptCached(FromWorker, tag=14):
    """worker -> router: the first `num_tokens` tokens of a prompt are cached and need no computation.

    Sent again when the number grows, always before the prompt's first output; never sent for 0 tokens.
    """

    request_id: RequestId
    attempt: Count
    num_tokens: Positive


class RequestFailed(FromWorker, tag=6):
    """worker -> router: an attempt ended without finishing; the worker keeps nothing of the attempt."""

    request_id: RequestId
    attempt: Count
    code: ErrorCode
    message: Text


class InquiryReply(FromWorker, tag=8):
    """worker -> router: attempts of an `Inquiry` owned by the worker; about any other attempt no message follows."""

    request_ids: RequestIds
    attempts: Column
    are_here: Flags  # a byte per attempt, 0: not owned

    def contradiction(self) -> str:
        return uneven(len(self.request_ids), num_ids(self.attempts), len(self.are_here))


class Welcome(WireStruct, tag=20):
    """router -> worker, memory server: registered. A new `router_epoch` voids requests of older epochs."""

    router_epoch: Epoch


class Refused(WireStruct, tag=21):
    """router -> worker, memory server: not registered. A worker exits, a memory server stops reporting."""

    reason: Text


class Reregister(WireStruct, tag=22):
    """router -> worker, memory server: a heartbeat came from an unknown sender; register again."""

    router_epoch: Epoch


class StillBound(WireStruct, tag=28):
    """router -> worker: answer to `WorkerLeaving`, with the number of requests still bound to the worker.

    An ending router sends 0 to every worker.
    """

    num_requests: Count


class Knock(WireStruct, tag=29):
    """router -> worker, memory server: no content. Successful sending shows a live process."""

    router_epoch: Epoch


class KVEventsWanted(WireStruct, tag=33):
    """router -> memory server: report all blocks of a pool now, and their changes from then on (see `KVEvents`)."""

    pool_id: Epoch


class DecodePeer(WireStruct, tag=23):
    """router -> prefill worker: a decode worker exists; dial it and offer the KV pool."""

    worker_id: WorkerId
    epoch: Epoch
    handoff_endpoint: OptionalLabel


class PeerGone(WireStruct, tag=24):
    """router -> worker: a worker's incarnation is dead; release everything kept for the incarnation."""

    worker_id: WorkerId
    epoch: Epoch


class PrefillRequest(OfAttempt, tag=25):
    """router -> prefill worker, or -> decode worker: compute a prompt.

    On a replay `token_ids` is the prompt followed by the `num_outputs` tokens already produced.
    `sampling.max_tokens` always counts from the first output.
    """

    token_ids: TokenIds
    num_outputs: Count
    sampling: SamplingParams
    decode_worker_id: WorkerId
    decode_epoch: Epoch
    priority: Priority  # lower is earlier, before `turn`
    turn: Turn  # order inside a priority, lower is earlier; see `waiting_queue`
    client: ClientId  # for a fair share of decode rows; 0: anonymous clients
    num_prompt_logprobs: NumLogprobs  # entries per prompt token, the token's own included
    first_scored: Count  # first prompt position with log-probabilities; the router has the earlier positions
    salt: OptionalDigest  # blocks are shared only under equal salts; see `block_key`
    holder_worker_id: OptionalId  # decode worker whose pool may hold a longer prefix; "" for none
    holder_epoch: Epoch
    most_tokens: Count  # decode worker: with more tokens to compute, return the prompt; 0: no limit
    waited_ms: Count  # since the arrival of the request; of one with outputs, since its last attempt ended

    def contradiction(self) -> str:
        return self.sampling.problem(num_ids(self.token_ids), self.num_outputs)


class Abort(OfAttempt, tag=26):
    """router -> prefill and decode worker: drop every attempt up to `attempt`; idempotent."""


class Inquiry(WireStruct, tag=27):
    """router -> worker: ask for ownership of attempts; answered after all messages sent before."""

    request_ids: RequestIds
    attempts: Column

    def contradiction(self) -> str:
        return uneven(len(self.request_ids), num_ids(self.attempts))


WorkerMessage = (
    WorkerReady | Heartbeat | WorkerLeaving | WorkerGone | KVPathReport | TokenBatch | LogprobBatch | PromptLogprobs
    | PromptCached | RequestFailed | InquiryReply | Welcome | Refused | Reregister | DecodePeer | PeerGone
    | PrefillRequest | DecodeRequest | Abort | Inquiry | StillBound | Knock | KVEventsWanted
    | KVPoolExport | KVProgress | KVPathResult
)  # fmt: skip
"""Messages of workers, except messages with a memory server."""

Message = WorkerMessage | MemoryMessage | MemoryReport | OperatorMessage | GateMessage | FrontMessage
