"""What prefill and decode workers say to one another; the rules are those of `messages`."""

from dataclasses import dataclass

from common.wire.fields import (
    BlockIds,
    Column,
    Count,
    Epoch,
    Handle,
    Label,
    OptionalLabel,
    Positive,
    ProcessId,
    RequestId,
    RequestIds,
    Seconds,
    Text,
    TokenIds,
    WorkerId,
)
from common.wire.kv_layout import KVLayout, NumBlocks
from common.wire.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class KVPoolExport:
    """prefill worker -> decode worker, once per meeting: where the pool is and how to prove it.

    The first block of each group holds the pattern made from `pool_id` by `memory.pattern`.
    """

    worker_id: WorkerId
    epoch: Epoch
    pid: ProcessId
    transport: Label
    device_uuid: OptionalLabel  # "" on a CPU
    pool_id: Epoch  # who has the same one shares it, and pulls nothing
    handle: Handle  # opaque to everyone but the transport
    num_blocks: NumBlocks
    layout: KVLayout


@dataclass(frozen=True, slots=True)
class KVHandoff:
    """prefill worker -> decode worker: this request's blocks are complete and kept for you.

    `token_ids` is prompt plus outputs including the one just sampled: its KV is the only one not
    in the blocks. `num_outputs` counts that one too.
    """

    worker_id: WorkerId
    epoch: Epoch
    request_id: RequestId
    attempt: Count
    token_ids: TokenIds
    num_outputs: Count
    sampling: SamplingParams
    block_ids: BlockIds
    lease_s: Seconds


@dataclass(frozen=True, slots=True)
class KVProgress:
    """prefill worker -> decode worker: blocks of a prompt that is still being computed, complete so far.

    A hint, to be ignored at will: nobody keeps the blocks for the receiver. What it copies of them counts only
    if `KVHandoff` of the same attempt follows, as then they have been this prompt's all the time.
    """

    worker_id: WorkerId
    epoch: Epoch
    request_id: RequestId
    attempt: Count
    num_tokens: Positive  # of the whole prompt, outputs before a replay included
    block_ids: BlockIds  # from the first block on; none when there will be no handoff after all


@dataclass(frozen=True, slots=True)
class KVLease:
    """decode -> prefill: keep these; prefill -> decode: these are kept (what is missing is lost)."""

    worker_id: WorkerId
    epoch: Epoch
    request_ids: RequestIds
    attempts: Column


@dataclass(frozen=True, slots=True)
class KVRelease:
    """decode worker -> prefill worker: pulled, aborted or refused; the blocks are yours again."""

    worker_id: WorkerId
    epoch: Epoch
    request_id: RequestId
    attempt: Count


@dataclass(frozen=True, slots=True)
class KVPathResult:
    """decode worker -> prefill worker: the answer to `KVPoolExport`; empty error means proven."""

    worker_id: WorkerId
    epoch: Epoch
    is_shared: bool  # the pool is the decode worker's, too: it takes offers of blocks
    error: Text
