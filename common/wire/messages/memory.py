"""Messages between a worker and the memory server of a device; `worker` has the rules for all messages."""

from enum import IntEnum
from typing import Annotated

from msgspec import Meta

from common.wire.messages.senders import FromMemoryServer, FromWorker, OfAttempt
from common.wire.messages.staging import BlocksStaged, BlocksStaging, StagingRegion, StagingWanted
from common.wire.values.fields import (
    KEY_BYTES,
    BlockFlags,
    BlockIds,
    BlockKeys,
    Count,
    Epoch,
    Handle,
    Label,
    OptionalDigest,
    OptionalLabel,
    Priority,
    RequestId,
    Text,
    Total,
    WireStruct,
    WorkerId,
)
from common.wire.values.kv_layout import Floor, KVLayout, NumBlocks, NumWanted, excess
from common.wire.values.packing import num_ids, uneven, unflagged, unsealed

MAX_BYTES = 1 << 44

NumBytes = Annotated[int, Meta(ge=1, le=MAX_BYTES)]
Bytes = Annotated[int, Meta(ge=0, le=MAX_BYTES)]


class RegionState(IntEnum):
    """State of a region of weights."""

    EMPTY = 1
    """The receiver of the message must fill the region."""
    FILLING = 2
    """A second worker fills the region; `WeightsProgress` and `WeightsFilled` follow, or EMPTY after its death."""
    FILLED = 3
    """All weights are there, and no process writes the region any more."""


class MemoryHello(FromWorker, tag=60):
    """worker -> memory server, first: the worker's identity. Claims end with the connection.

    A descriptor of the worker's process comes along.
    """

    is_decoding: bool  # decode workers get blocks before prompts do


class MemoryVisit(FromWorker, tag=68):
    """worker -> another pool's memory server, first: the peer's identity, and the pool to pull from.

    A peer accepts offers there or looks up prefixes, and gives blocks back after pulling. A peer writes nothing, so
    all claims end at once with the connection. A `PoolRegion` is the answer.
    """

    pool_id: Epoch


class MemoryWelcome(FromMemoryServer, tag=66):
    """memory server -> worker, first: the memory server's identity, for the worker to name to the router."""

    gate: OptionalLabel = ""  # endpoint for workers of other hosts; "" if there is none


class WeightsWanted(WireStruct, tag=61):
    """worker -> memory server: ask for a region of weights, shared by workers of equal fingerprint and layout."""

    fingerprint: Label
    layout: Label
    num_bytes: NumBytes


class WeightsRegion(WireStruct, tag=62):
    """memory server -> worker: the region of weights; on a CPU with a descriptor.

    Sent again as EMPTY after the death of the filler, to the next worker in line.
    """

    state: RegionState
    handle: Handle  # CUDA IPC handle; "" on a CPU
    num_bytes: NumBytes


class WeightsProgress(WireStruct, tag=63):
    """filling worker -> memory server -> waiting workers: bytes of the region filled so far."""

    num_filled: Bytes


class WeightsFilled(WireStruct, tag=64):
    """filling worker -> memory server -> waiting workers: the region is complete."""

    num_bytes: NumBytes


class MemoryRefused(WireStruct, tag=65):
    """memory server -> worker, last: the worker's demand is refused."""

    reason: Text


class MemoryTainted(WireStruct, tag=69):
    """worker -> memory server: a device fault, which may have damaged any memory mapped by the worker.

    memory server -> workers with a mapping of some of the memory: stop, because the memory may be damaged. A restarted
    worker gets other memory.
    """

    problem: Text


class MemoryKnock(WireStruct, tag=67):
    """worker -> memory server, and back: a sign of life.

    The server's `num_done` counts how often blocks of the worker's pool were sealed or changed owner. While the count
    grows, some worker makes progress there. `num_done` from a worker has no meaning.
    """

    num_done: Total = 0


class PoolWanted(WireStruct, tag=70):
    """worker -> memory server: ask for the pool of KV blocks of a layout; the rest tells a new pool's shape."""

    layout: KVLayout
    num_blocks: NumBlocks
    floor: Floor = ()

    def contradiction(self) -> str:
        return self.layout.problem(self.num_blocks, self.floor)


class PoolRegion(WireStruct, tag=71):
    """memory server -> worker: the memory of a pool; on a CPU with a descriptor.

    `pool_id` names this very memory, and block ids are valid only inside. Proof blocks hold patterns made from
    `pool_id`.
    """

    pool_id: Epoch
    handle: Handle  # CUDA IPC handle; "" on a CPU
    num_blocks: NumBlocks
    floor: Floor = ()

    def contradiction(self) -> str:
        return uneven(len(self.num_blocks), len(self.floor or self.num_blocks)) or excess(self.floor, self.num_blocks)


class BlocksWanted(WireStruct, tag=72):
    """worker -> memory server: ask for `num_blocks` of each group, all at once; replaces the demand before."""

    num_blocks: NumWanted


class NamedBlocks(WireStruct):
    """Blocks of a pool, each with its generation."""

    block_ids: BlockIds
    generations: BlockIds

    def contradiction(self) -> str:
        return uneven(num_ids(self.block_ids), num_ids(self.generations))


class BlocksLeased(NamedBlocks, tag=73):
    """memory server -> worker: blocks leased until given back; messages about the blocks must name the generations."""


class BlocksFreed(NamedBlocks, tag=74):
    """worker -> memory server: give blocks back; nothing in the worker reads or writes the blocks any more."""


class BlocksSealed(NamedBlocks, tag=80):
    """worker -> memory server: seal blocks under keys (see `block_key`); nothing writes the blocks any more.

    The worker reads the blocks until giving the blocks back. Other workers may find the blocks by key and read, too.
    """

    keys: BlockKeys

    def contradiction(self) -> str:
        return NamedBlocks.contradiction(self) or uneven(num_ids(self.block_ids), len(self.keys) // KEY_BYTES)


class PromptWanted(OfAttempt, tag=81):
    """worker -> memory server: ask for all blocks of a prompt, with sealed blocks for the longest prefix found by keys.

    The server answers once, with all blocks, and waits until enough blocks are free. Blocks in the host tier are
    restored first if a restore is faster than computing. A peer asks for 0 blocks, and gets only the blocks found.

    Found blocks replace wanted blocks of append-only groups. In other groups they are granted in addition: blocks of a
    window to read, and a snapshot of a state to copy.
    """

    keys: BlockKeys
    block_us: Count  # to compute a block, in microseconds; 0: restore nothing
    num_blocks: NumWanted  # of the whole prompt, by group
    priority: Priority  # lower is earlier
    first: Count = 0  # place of the first key; from a peer, which has the places before
    resumes: bool = True  # False: blocks of append-only groups only
    num_snapshots: Count = 0  # more blocks of each state; none if they are not free at once


class PromptBlocks(OfAttempt, tag=82):
    """memory server -> worker: the blocks of a prompt.

    The first `num_sealed` blocks were found by keys and are for reading; the other blocks are leased to the worker.
    Both parts go group by group, in the order of places.
    """

    block_ids: BlockIds
    generations: BlockIds
    num_sealed: Count
    num_places: Count = 0  # leading places of the text that need no computing
    num_alike: Count = 0  # leading places with sealed blocks in all append-only groups; never fewer

    def contradiction(self) -> str:
        if self.num_alike < self.num_places:
            return f"{self.num_places} places are found, {self.num_alike} of them in append-only groups"
        return unsealed(self.block_ids, self.generations, self.num_sealed)


class PromptUnwanted(OfAttempt, tag=84):
    """worker -> memory server: cancel the attempt's `PromptWanted`, unless already answered."""


class PoolLeft(NamedBlocks, tag=79):
    """worker -> memory server, last of all: leave the pool.

    All blocks leased or offered to the worker become free, even in messages not received yet. Only the named blocks do
    not, because the worker's device may still write there.
    """


class PoolShortage(WireStruct, tag=75):
    """memory server -> worker: a client waits for blocks, so give unused blocks back; or the shortage is over."""

    is_short: bool


class KVOffer(WireStruct, tag=76):
    """prefill worker -> memory server -> decode worker: an offer of a prompt's complete blocks.

    The prefill worker owns the request until `KVReceived` or `KVDeclined` answers. The memory server keeps the blocks
    until acceptance or refusal, whichever process dies meanwhile. The decode worker knows the prompt and the sampling
    parameters from the `DecodeRequest`. `token_id` is the token just sampled; only its KV is not in the blocks.

    The blocks are all blocks seen by the next token, in each group by place; `are_sealed` marks the sealed blocks.
    `digest` belongs to the last full block, so the decode worker can seal the next block. `root` starts the chain of
    digests, so a peer can look for the blocks in the peer's own pool. Both are "" if nothing is to be sealed.
    """

    decode_worker_id: WorkerId
    decode_epoch: Epoch
    request_id: RequestId
    attempt: Count
    token_id: Count
    block_ids: BlockIds
    generations: BlockIds
    are_sealed: BlockFlags
    root: OptionalDigest
    digest: OptionalDigest

    def contradiction(self) -> str:
        if bool(self.root) != bool(self.digest):
            return "a chain of keys has a root and a digest"
        num_blocks = num_ids(self.block_ids)
        return uneven(num_blocks, num_ids(self.generations)) or unflagged(num_blocks, self.are_sealed)


class KVReceived(OfAttempt, tag=83):
    """decode worker -> memory server -> prefill worker: the offer arrived, and the decode worker owns the request."""


class KVAccepted(OfAttempt, tag=77):
    """decode worker -> memory server: accept an offer; the worker now owns the blocks, and a peer may read the blocks.

    Implies `KVReceived` if not sent before.
    """


class KVDeclined(OfAttempt, tag=78):
    """decode worker -> memory server: decline an offer; the blocks are free.

    memory server -> prefill worker: an offer never received by the decode worker is void, and the blocks are free.
    """


OfBlocks = (
    BlocksWanted | BlocksSealed | BlocksFreed | PromptWanted | PromptUnwanted | PoolLeft
    | KVOffer | KVReceived | KVAccepted | KVDeclined
)  # fmt: skip
"""Messages of a worker about blocks of a pool."""
OfPeers = (
    PromptWanted | BlocksFreed | KVReceived | KVAccepted | KVDeclined | MemoryKnock | MemoryTainted | StagingWanted
    | BlocksStaging
)  # fmt: skip
"""Messages allowed to peers."""
MemoryMessage = (
    MemoryHello | MemoryWelcome | WeightsWanted | WeightsRegion | WeightsProgress | WeightsFilled | MemoryRefused
    | MemoryVisit | PoolWanted | PoolRegion | PoolLeft | PoolShortage | BlocksWanted | BlocksLeased | BlocksFreed
    | BlocksSealed | PromptWanted | PromptBlocks | PromptUnwanted | KVOffer | KVReceived | KVAccepted | KVDeclined
    | MemoryKnock | MemoryTainted | StagingWanted | StagingRegion | BlocksStaging | BlocksStaged
)  # fmt: skip
