"""Messages between a worker and the memory server of a device; `worker` has the rules for all messages."""

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
    """State of a region of weights."""

    EMPTY = 1
    """The receiver of the message must fill the region."""
    FILLING = 2
    """A second worker fills the region; `WeightsProgress` and `WeightsFilled` follow, or EMPTY after its death."""
    FILLED = 3
    """All weights are there, and no process writes the region any more."""


@dataclass(frozen=True, slots=True)
class MemoryHello:
    """worker -> memory server, first: the worker's identity. Claims end with the connection.

    A descriptor of the worker's process comes along.
    """

    worker_id: WorkerId
    epoch: Epoch
    is_decoding: bool  # decode workers get blocks before prompts do


@dataclass(frozen=True, slots=True)
class MemoryVisit:
    """worker -> another pool's memory server, first: the guest's identity, and the pool to pull from.

    A guest accepts offers there or looks up prefixes, and gives blocks back after pulling. A guest writes nothing, so
    all claims end at once with the connection. A `PoolRegion` is the answer.
    """

    worker_id: WorkerId
    epoch: Epoch
    pool_id: Epoch


@dataclass(frozen=True, slots=True)
class MemoryWelcome:
    """memory server -> worker, first: the memory server's identity, for the worker to name to the router."""

    server_id: WorkerId
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class WeightsWanted:
    """worker -> memory server: ask for a region of weights, shared by workers of equal fingerprint and layout."""

    fingerprint: Label
    layout: Label
    num_bytes: NumBytes


@dataclass(frozen=True, slots=True)
class WeightsRegion:
    """memory server -> worker: the region of weights; on a CPU with a descriptor.

    Sent again as EMPTY after the death of the filler, to the next worker in line.
    """

    state: RegionState
    handle: Handle  # CUDA IPC handle; "" on a CPU
    num_bytes: NumBytes


@dataclass(frozen=True, slots=True)
class WeightsProgress:
    """filling worker -> memory server -> waiting workers: bytes of the region filled so far."""

    num_filled: Bytes


@dataclass(frozen=True, slots=True)
class WeightsFilled:
    """filling worker -> memory server -> waiting workers: the region is complete."""

    num_bytes: NumBytes


@dataclass(frozen=True, slots=True)
class MemoryRefused:
    """memory server -> worker, last: the worker's demand is refused."""

    reason: Text


@dataclass(frozen=True, slots=True)
class MemoryTainted:
    """worker -> memory server: a device fault, which may have damaged any memory mapped by the worker.

    memory server -> workers with a mapping of some of the memory: stop, because the memory may be damaged. A restarted
    worker gets other memory.
    """

    problem: Text


@dataclass(frozen=True, slots=True)
class MemoryKnock:
    """worker -> memory server, and back: a sign of life.

    The server's `num_done` counts how often blocks of the worker's pool were sealed or changed owner. While the count
    grows, some worker makes progress there. `num_done` from a worker has no meaning.
    """

    num_done: Total = 0


@dataclass(frozen=True, slots=True)
class PoolWanted:
    """worker -> memory server: ask for the pool of KV blocks of a layout; `num_blocks` is the size of a new pool."""

    layout: KVLayout
    num_blocks: NumBlocks


@dataclass(frozen=True, slots=True)
class PoolRegion:
    """memory server -> worker: the memory of a pool; on a CPU with a descriptor.

    `pool_id` names this very memory, and block ids are valid only inside. Proof blocks hold patterns made from
    `pool_id`.
    """

    pool_id: Epoch
    handle: Handle  # CUDA IPC handle; "" on a CPU
    num_blocks: NumBlocks


@dataclass(frozen=True, slots=True)
class BlocksWanted:
    """worker -> memory server: ask for `num_blocks` of each group, all at once; replaces the demand before."""

    num_blocks: NumWanted


@dataclass(frozen=True, slots=True)
class BlocksLeased:
    """memory server -> worker: blocks leased until given back; messages about the blocks must name the generations."""

    block_ids: BlockIds
    generations: BlockIds


@dataclass(frozen=True, slots=True)
class BlocksFreed:
    """worker -> memory server: give blocks back; nothing in the worker reads or writes the blocks any more."""

    block_ids: BlockIds
    generations: BlockIds


@dataclass(frozen=True, slots=True)
class BlocksSealed:
    """worker -> memory server: seal blocks under keys (see `block_key`); nothing writes the blocks any more.

    The worker reads the blocks until giving the blocks back. Other workers may find the blocks by key and read, too.
    """

    block_ids: BlockIds
    generations: BlockIds
    keys: BlockKeys


@dataclass(frozen=True, slots=True)
class PromptWanted:
    """worker -> memory server: ask for all blocks of a prompt, with sealed blocks for the longest prefix found by keys.

    The server answers once, with all blocks, and waits until enough blocks are free. Blocks in the host tier are
    restored first if a restore is faster than computing. A guest asks for 0 blocks, and gets only the blocks found.
    """

    request_id: RequestId
    attempt: Count
    keys: BlockKeys
    block_us: Count  # to compute a block, in microseconds; 0: restore nothing
    num_blocks: Count  # blocks of the first group
    priority: Priority  # lower is earlier


@dataclass(frozen=True, slots=True)
class PromptBlocks:
    """memory server -> worker: the blocks of a prompt.

    The first `num_sealed` blocks were found by keys and are for reading; the other blocks are leased to the worker.
    """

    request_id: RequestId
    attempt: Count
    block_ids: BlockIds
    generations: BlockIds
    num_sealed: Count


@dataclass(frozen=True, slots=True)
class PromptUnwanted:
    """worker -> memory server: cancel the attempt's `PromptWanted`, unless already answered."""

    request_id: RequestId
    attempt: Count


@dataclass(frozen=True, slots=True)
class PoolLeft:
    """worker -> memory server, last of all: leave the pool.

    All blocks leased or offered to the worker become free, even in messages not received yet. Only the named blocks do
    not, because the worker's device may still write there.
    """

    block_ids: BlockIds
    generations: BlockIds


@dataclass(frozen=True, slots=True)
class PoolShortage:
    """memory server -> worker: a client waits for blocks, so give unused blocks back; or the shortage is over."""

    is_short: bool


@dataclass(frozen=True, slots=True)
class KVOffer:
    """prefill worker -> memory server -> decode worker: an offer of a prompt's complete blocks.

    The prefill worker owns the request until `KVReceived` or `KVDeclined` answers. The memory server keeps the blocks
    until acceptance or refusal, whichever process dies meanwhile. The decode worker knows the prompt and the sampling
    parameters from the `DecodeRequest`. `token_id` is the token just sampled; only its KV is not in the blocks.

    The blocks are all blocks seen by the next token, in each group by place; the first `num_sealed` are sealed.
    `digest` belongs to the last full block, so the decode worker can seal the next block. `root` starts the chain of
    digests, so a guest can look for the blocks in the guest's own pool. Both are "" if nothing is to be sealed.
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
    """decode worker -> memory server -> prefill worker: the offer arrived, and the decode worker owns the request."""

    request_id: RequestId
    attempt: Count


@dataclass(frozen=True, slots=True)
class KVAccepted:
    """decode worker -> memory server: accept an offer; the worker now owns the blocks, and a guest may read the blocks.

    Implies `KVReceived` if not sent before.
    """

    request_id: RequestId
    attempt: Count


@dataclass(frozen=True, slots=True)
class KVDeclined:
    """decode worker -> memory server: decline an offer; the blocks are free.

    memory server -> prefill worker: an offer never received by the decode worker is void, and the blocks are free.
    """

    request_id: RequestId
    attempt: Count


OfBlocks = (
    BlocksWanted | BlocksSealed | BlocksFreed | PromptWanted | PromptUnwanted | PoolLeft
    | KVOffer | KVReceived | KVAccepted | KVDeclined
)  # fmt: skip
"""Messages of a worker about blocks of a pool."""
OfGuests = PromptWanted | BlocksFreed | KVReceived | KVAccepted | KVDeclined | MemoryKnock | MemoryTainted
"""Messages allowed to guests."""
MemoryMessage = (
    MemoryHello | MemoryWelcome | WeightsWanted | WeightsRegion | WeightsProgress | WeightsFilled | MemoryRefused
    | MemoryVisit | PoolWanted | PoolRegion | PoolLeft | PoolShortage | BlocksWanted | BlocksLeased | BlocksFreed
    | BlocksSealed | PromptWanted | PromptBlocks | PromptUnwanted | KVOffer | KVReceived | KVAccepted | KVDeclined
    | MemoryKnock | MemoryTainted
)  # fmt: skip
