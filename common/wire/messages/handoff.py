"""What makes a handoff between a prefill and a decode worker; the rules are those of `messages`."""

from dataclasses import dataclass

from common.wire.values.fields import (
    BlockIds,
    ClientId,
    Count,
    Epoch,
    Label,
    OptionalLabel,
    Positive,
    Priority,
    RequestId,
    Text,
    TokenIds,
    WorkerId,
)
from common.wire.values.kv_layout import KVLayout
from common.wire.values.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class DecodeRequest:
    """router -> decode worker: a prefill worker computes this prompt, and will offer its blocks (see `KVOffer`).

    Sent before the `PrefillRequest`. Fields mean what they mean there.
    """

    request_id: RequestId
    attempt: Count
    token_ids: TokenIds
    num_outputs: Count
    sampling: SamplingParams
    priority: Priority
    client: ClientId


@dataclass(frozen=True, slots=True)
class KVPoolExport:
    """prefill worker -> decode worker, at their meeting: where its pool is. Whose own is another goes there as a guest.

    decode worker -> prefill worker, when the path is proven: likewise, if its own is another.
    The first block of each group holds the pattern made from `pool_id` by `memory.pattern`.
    """

    worker_id: WorkerId
    epoch: Epoch
    transport: Label
    device_uuid: OptionalLabel  # "" on a CPU
    pool_id: Epoch  # who has the same one shares it, and pulls nothing
    memory_socket: Label  # path of the memory server that it is at
    layout: KVLayout


@dataclass(frozen=True, slots=True)
class KVProgress:
    """prefill worker -> decode worker: blocks of a prompt that is still being computed, complete so far.

    A hint, to be ignored at will: nobody keeps the blocks for the receiver. What it copies of them counts only
    if a `KVOffer` of the same generations follows, as then they have been this prompt's all the time.
    """

    worker_id: WorkerId
    epoch: Epoch
    request_id: RequestId
    attempt: Count
    num_tokens: Positive  # of the whole prompt, outputs before a replay included
    block_ids: BlockIds  # of groups whose blocks stay as they are, from the first on; none: nothing will be offered
    generations: BlockIds


@dataclass(frozen=True, slots=True)
class KVPathResult:
    """decode worker -> prefill worker: the answer to `KVPoolExport`, and again when it changes; empty error: proven."""

    worker_id: WorkerId
    epoch: Epoch
    is_shared: bool  # the pool is the decode worker's, too: there is nothing to be pulled
    error: Text
