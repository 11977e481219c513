"""Every message that crosses a process boundary; the first line of each docstring is its arrow.

On the wire a message is a positional msgpack array `[WIRE_VERSION, tag, *fields]` (see `frames`).
Rules: fields are only ever appended, tags are never reused, token ids and block ids travel as
int32 bytes (`pack_ids`), and nothing is pickled.

Identity. A worker makes a new `epoch` at each start and puts it into everything it says; a request
has a server-made `request_id` and an `attempt` that grows with each replay. What a dead incarnation
or a superseded attempt says is dropped by its receiver.
"""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

from common.errors import ErrorCode
from common.wire.kv_layout import KVLayout
from common.wire.sampling_params import SamplingParams

WIRE_VERSION = 2


class Role(IntEnum):
    PREFILL = 1
    DECODE = 2


class FinishReason(IntEnum):
    NOT_FINISHED = 0
    STOP = 1
    LENGTH = 2


def pack_ids(ids: Iterable[int]) -> bytes:
    """Int32 little-endian bytes of token or block ids."""
    return array("i", ids).tobytes()


def unpack_ids(data: bytes) -> list[int]:
    """Inverse of `pack_ids`; raises ValueError when the length is not a multiple of 4."""
    ids = array("i")
    ids.frombytes(data)
    return ids.tolist()


# --- worker -> router ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """worker -> router: register; sent again whenever the router asks with `Reregister`."""

    worker_id: str
    epoch: int
    role: Role
    pid: int
    device: str  # "cpu", or "cuda:0 NVIDIA H200 GPU-<uuid>"
    model_name: str
    model_fingerprint: str
    tokenizer_fingerprint: str
    kv_layout: KVLayout
    num_blocks: int
    max_model_len: int  # tokens
    max_batch_tokens: int  # prefill: token budget of a step; decode: 0
    max_num_seqs: int  # prefill: prompts of a step; decode: rows of the batch
    transport: str  # "cuda_ipc" or "shm"; "none" when the worker must not hand off
    handoff_endpoint: str  # where prefill workers dial a decode worker; "" for prefill


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """worker -> router, from a thread of its own: alive, how busy, and since when without a step."""

    worker_id: str
    epoch: int
    num_waiting: int
    num_running: int
    num_free_blocks: int
    num_handoffs: int  # prefill: blocks kept for a peer; decode: handoffs waiting, being pulled, or begun ahead
    last_step_age_s: float  # 0 while idle
    num_dropped_frames: int


@dataclass(frozen=True, slots=True)
class WorkerLeaving:
    """worker -> router: send nothing new; what is in flight is being finished."""

    worker_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class KVPathReport:
    """decode worker -> router: the way blocks travel from one prefill worker has been tried."""

    worker_id: str
    epoch: int
    prefill_worker_id: str
    prefill_epoch: int
    transport: str
    gb_per_s: float  # 0 when the path failed
    error: str  # "" when the path works


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """worker -> router: one step's tokens, as columns of equal length.

    `output_indices` counts a request's output tokens from 0. The first comes from the prefill
    worker and the rest from the decode worker, and no order holds between two sockets: the
    router puts them in order by index.
    """

    worker_id: str
    epoch: int
    request_ids: tuple[str, ...]
    attempts: bytes  # int32
    output_indices: bytes  # int32
    token_ids: bytes  # int32
    finish_reasons: bytes  # one FinishReason a byte


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """worker -> router: this attempt ended without finishing; the worker keeps nothing of it."""

    worker_id: str
    epoch: int
    request_id: str
    attempt: int
    code: ErrorCode
    message: str


# --- router -> worker ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Welcome:
    """router -> worker: registered. A new `router_epoch` means requests of an older one are void."""

    router_epoch: int


@dataclass(frozen=True, slots=True)
class Refused:
    """router -> worker: not registered, and why; the worker exits."""

    reason: str


@dataclass(frozen=True, slots=True)
class Reregister:
    """router -> worker: a heartbeat came from somebody unknown; send `WorkerReady` again."""

    router_epoch: int


@dataclass(frozen=True, slots=True)
class DecodePeer:
    """router -> prefill worker: a decode worker exists; dial it and offer the KV pool."""

    worker_id: str
    epoch: int
    handoff_endpoint: str


@dataclass(frozen=True, slots=True)
class PeerGone:
    """router -> worker: that incarnation is dead; release what was kept for it."""

    worker_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class PrefillRequest:
    """router -> prefill worker, or -> decode worker when the prompt is to be computed there.

    On a replay `token_ids` is the prompt followed by the `num_outputs` tokens already produced;
    `sampling.max_tokens` always counts from the first output.
    """

    request_id: str
    attempt: int
    token_ids: bytes  # int32
    num_outputs: int
    sampling: SamplingParams
    decode_worker_id: str
    decode_epoch: int
    whole_gpu: bool  # it may be computed with all of the GPU, whatever decode steps there lose by it


@dataclass(frozen=True, slots=True)
class Abort:
    """router -> prefill and decode worker: let go of every attempt up to this one; idempotent."""

    request_id: str
    attempt: int


# --- prefill worker -> decode worker ------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KVPoolExport:
    """prefill worker -> decode worker, once per meeting: where the pool is and how to prove it.

    Block `proof_block` holds the pattern made from `epoch` by `kv.proof`.
    """

    worker_id: str
    epoch: int
    pid: int
    transport: str
    device_uuid: str  # "" on a CPU
    handle: bytes  # opaque to everyone but the transport
    num_blocks: int
    layout: KVLayout
    proof_block: int


@dataclass(frozen=True, slots=True)
class KVHandoff:
    """prefill worker -> decode worker: this request's blocks are complete and kept for you.

    `token_ids` is prompt plus outputs including the one just sampled: its KV is the only one not
    in the blocks. `num_outputs` counts that one too.
    """

    worker_id: str
    epoch: int
    request_id: str
    attempt: int
    token_ids: bytes  # int32
    num_outputs: int
    sampling: SamplingParams
    block_ids: bytes  # int32
    lease_s: float


@dataclass(frozen=True, slots=True)
class KVProgress:
    """prefill worker -> decode worker: blocks of a prompt that is still being computed, complete so far.

    A hint, to be ignored at will: nobody keeps the blocks for the receiver. What it copies of them counts only
    if `KVHandoff` of the same attempt follows, as then they have been this prompt's all the time.
    """

    worker_id: str
    epoch: int
    request_id: str
    attempt: int
    num_tokens: int  # of the whole prompt, outputs before a replay included
    block_ids: bytes  # int32, from the first block on; none when there will be no handoff after all


# --- both ways between prefill and decode workers -----------------------------------------------


@dataclass(frozen=True, slots=True)
class KVLease:
    """decode -> prefill: keep these; prefill -> decode: these are kept (what is missing is lost).

    Sent at least every third of a lease, empty too: it is also the sign of life between peers.
    """

    worker_id: str
    epoch: int
    request_ids: tuple[str, ...]
    attempts: bytes  # int32


# --- decode worker -> prefill worker ------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KVRelease:
    """decode worker -> prefill worker: pulled, aborted or refused; the blocks are yours again."""

    worker_id: str
    epoch: int
    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class KVPathResult:
    """decode worker -> prefill worker: the answer to `KVPoolExport`; empty error means proven."""

    worker_id: str
    epoch: int
    error: str


Message = (
    WorkerReady
    | Heartbeat
    | WorkerLeaving
    | KVPathReport
    | TokenBatch
    | RequestFailed
    | Welcome
    | Refused
    | Reregister
    | DecodePeer
    | PeerGone
    | PrefillRequest
    | Abort
    | KVPoolExport
    | KVHandoff
    | KVLease
    | KVRelease
    | KVPathResult
    | KVProgress
)

# Tags are the wire's names: never renumbered, never reused.
TAGS: dict[int, type[Message]] = {
    1: WorkerReady,
    2: Heartbeat,
    3: WorkerLeaving,
    4: KVPathReport,
    5: TokenBatch,
    6: RequestFailed,
    20: Welcome,
    21: Refused,
    22: Reregister,
    23: DecodePeer,
    24: PeerGone,
    25: PrefillRequest,
    26: Abort,
    40: KVPoolExport,
    41: KVHandoff,
    42: KVLease,
    43: KVRelease,
    44: KVPathResult,
    45: KVProgress,
}
