"""What a worker and the memory server of its device say to one another; the rules are those of `messages`."""

from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated

from common.wire.values.fields import (
    BlockIds,
    BlockKeys,
    Count,
    Epoch,
    Handle,
    Label,
    OptionalDigest,
    Priority,
    Range,
    RequestId,
    Text,
    Total,
    WorkerId,
)
from common.wire.values.kv_layout import KVLayout, NumBlocks, NumWanted

MAX_BYTES = 1 << 44

NumBytes = Annotated[int, Range(1, MAX_BYTES)]
Bytes = Annotated[int, Range(0, MAX_BYTES)]


class RegionState(IntEnum):
    """How far the weights in a region are."""

    EMPTY = 1
    """Whoever is told so fills it."""
    FILLING = 2
    """Another worker does; `WeightsProgress` and `WeightsFilled` follow, or EMPTY if it dies."""
    FILLED = 3
    """All there, and from now on nobody writes them."""


@dataclass(frozen=True, slots=True)
class MemoryHello:
    """worker -> memory server, first: who it is, with a descriptor of its process. Claims end with the connection."""

    worker_id: WorkerId
    epoch: Epoch
    is_decoding: bool  # then it gets blocks before those that begin with prompts


@dataclass(frozen=True, slots=True)
class MemoryVisit:
    """worker -> memory server of another pool than its own, first: who it is, and which pool it pulls from.

    It takes offers there or looks for texts, and gives back what it has pulled; it writes nothing, so that its claims
    are void as soon as the connection ends. A `PoolRegion` is the answer.
    """

    worker_id: WorkerId
    epoch: Epoch
    pool_id: Epoch


@dataclass(frozen=True, slots=True)
class MemoryWelcome:
    """memory server -> worker, first: whose connection this is; the worker names it to the router."""

    server_id: WorkerId
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class WeightsWanted:
    """worker -> memory server: a region for the weights of this model in this layout, which is another's, too."""

    fingerprint: Label
    layout: Label
    num_bytes: NumBytes


@dataclass(frozen=True, slots=True)
class WeightsRegion:
    """memory server -> worker: where it is; on a CPU a descriptor comes along. Again if it is EMPTY after all."""

    state: RegionState
    handle: Handle  # of CUDA IPC; "" on a CPU
    num_bytes: NumBytes


@dataclass(frozen=True, slots=True)
class WeightsProgress:
    """the worker that fills a region -> memory server -> those that wait for it."""

    num_filled: Bytes


@dataclass(frozen=True, slots=True)
class WeightsFilled:
    """the worker that filled a region -> memory server -> those that wait for it: every byte is there."""

    num_bytes: NumBytes


@dataclass(frozen=True, slots=True)
class MemoryRefused:
    """memory server -> worker, last: what it cannot have, and why."""

    reason: Text


@dataclass(frozen=True, slots=True)
class MemoryTainted:
    """worker -> memory server: its device met this fault, so it may have written anywhere in what it maps.

    memory server -> whoever maps some of that: stop, what is there may be damaged; start again, and get other memory.
    """

    problem: Text


@dataclass(frozen=True, slots=True)
class MemoryKnock:
    """worker -> memory server, and back: is somebody there?

    Back it tells how often blocks of the worker's pool were written or have changed hands: while that grows, somebody
    gets on there. Of the worker it means nothing.
    """

    num_done: Total = 0


@dataclass(frozen=True, slots=True)
class PoolWanted:
    """worker -> memory server: the pool of KV blocks of this layout; so large if it is not there yet."""

    layout: KVLayout
    num_blocks: NumBlocks


@dataclass(frozen=True, slots=True)
class PoolRegion:
    """memory server -> worker: where the pool is; on a CPU a descriptor comes along.

    `pool_id` names this very memory: block ids mean nothing elsewhere. Proof blocks hold patterns made from it.
    """

    pool_id: Epoch
    handle: Handle  # of CUDA IPC; "" on a CPU
    num_blocks: NumBlocks


@dataclass(frozen=True, slots=True)
class BlocksWanted:
    """worker -> memory server: so many blocks of each group, all at once; in place of what it wanted before."""

    num_blocks: NumWanted


@dataclass(frozen=True, slots=True)
class BlocksLeased:
    """memory server -> worker: yours until you give them back; what you say of them names their generations."""

    block_ids: BlockIds
    generations: BlockIds


@dataclass(frozen=True, slots=True)
class BlocksFreed:
    """worker -> memory server: nothing here touches these any more."""

    block_ids: BlockIds
    generations: BlockIds


@dataclass(frozen=True, slots=True)
class BlocksSealed:
    """worker -> memory server: nothing here writes these any more, and their keys are these (see `block_key`).

    It reads them until it gives them back; whoever looks for the keys may read them, too.
    """

    block_ids: BlockIds
    generations: BlockIds
    keys: BlockKeys


@dataclass(frozen=True, slots=True)
class PromptWanted:
    """worker -> memory server: all blocks of a prompt; those that its keys find, from its first on, count.

    The server answers once, with all of them, or keeps the question until there are so many. Blocks in host memory are
    restored first if that takes less time than to compute them. A guest wants 0 blocks, and hears what is found.
    """

    request_id: RequestId
    attempt: Count
    keys: BlockKeys
    block_us: Count  # that computing a block takes there, in microseconds; 0: nothing is to be restored for it
    num_blocks: Count  # of the first group
    priority: Priority  # lower is earlier


@dataclass(frozen=True, slots=True)
class PromptBlocks:
    """memory server -> worker: the blocks of a prompt.

    The first `num_sealed` are those that its keys found, for the worker to read; the rest is leased to it.
    """

    request_id: RequestId
    attempt: Count
    block_ids: BlockIds
    generations: BlockIds
    num_sealed: Count


@dataclass(frozen=True, slots=True)
class PromptUnwanted:
    """worker -> memory server: forget `PromptWanted` of this attempt, if it is not answered yet."""

    request_id: RequestId
    attempt: Count


@dataclass(frozen=True, slots=True)
class PoolLeft:
    """worker -> memory server, last of all: it takes no part in the pool any more.

    Free is what it was leased, heard of or not, and what it was offered, but for these, which its device may still
    write.
    """

    block_ids: BlockIds
    generations: BlockIds


@dataclass(frozen=True, slots=True)
class PoolShortage:
    """memory server -> worker: somebody waits for blocks, so give back what is not in use; or nobody does."""

    is_short: bool


@dataclass(frozen=True, slots=True)
class KVOffer:
    """prefill worker -> memory server -> decode worker: a prompt's blocks, complete, for you to take.

    The prefill worker owns the request until `KVReceived` or `KVDeclined` answers. The blocks are nobody's until they
    are accepted or declined, whichever process dies meanwhile. The decode worker knows the prompt and how to sample
    from its `DecodeRequest`; `token_id` is the token just sampled, the only one whose KV is not in the blocks.

    Blocks are those that the next token sees, in each group by place; the first `num_sealed` are sealed. `digest` is of
    the last full one, so that the decode worker can seal the next. `root` is where the chain of keys begins, by which
    a guest looks for the blocks in its own pool. Both are "" if nothing is to be sealed.
    """

    decode_worker_id: WorkerId
    decode_epoch: Epoch
    request_id: RequestId
    attempt: Count
    token_id: Count
    block_ids: BlockIds
    generations: BlockIds
    num_sealed: Count
    root: OptionalDigest
    digest: OptionalDigest


@dataclass(frozen=True, slots=True)
class KVReceived:
    """decode worker -> memory server -> prefill worker: the offer is here, and the decode worker owns the request."""

    request_id: RequestId
    attempt: Count


@dataclass(frozen=True, slots=True)
class KVAccepted:
    """decode worker -> memory server: the blocks of this offer are this worker's; a guest's to read.

    It says `KVReceived`, too, where that was not said before.
    """

    request_id: RequestId
    attempt: Count


@dataclass(frozen=True, slots=True)
class KVDeclined:
    """decode worker -> memory server: the blocks of this offer are free.

    memory server -> prefill worker: an offer that the decode worker never received is void; its blocks are free.
    """

    request_id: RequestId
    attempt: Count


OfBlocks = (
    BlocksWanted | BlocksSealed | BlocksFreed | PromptWanted | PromptUnwanted | PoolLeft
    | KVOffer | KVReceived | KVAccepted | KVDeclined
)  # fmt: skip
"""What a worker says of the blocks of a pool that it has."""
OfGuests = PromptWanted | BlocksFreed | KVReceived | KVAccepted | KVDeclined | MemoryKnock | MemoryTainted
"""What who only pulls from a pool may say."""
MemoryMessage = (
    MemoryHello | MemoryWelcome | WeightsWanted | WeightsRegion | WeightsProgress | WeightsFilled | MemoryRefused
    | MemoryVisit | PoolWanted | PoolRegion | PoolLeft | PoolShortage | BlocksWanted | BlocksLeased | BlocksFreed
    | BlocksSealed | PromptWanted | PromptBlocks | PromptUnwanted | KVOffer | KVReceived | KVAccepted | KVDeclined
    | MemoryKnock | MemoryTainted
)  # fmt: skip
