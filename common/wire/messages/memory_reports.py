"""Messages from a memory server to the router: liveness, load, ended workers, and blocks found by keys.

A memory server identifies itself by `server_id` and by `epoch`, which is new at each start. `worker` has the rules
for all messages.
"""

from enum import IntEnum
from typing import Annotated

from msgspec import Meta

from common.wire.messages.memory import Bytes
from common.wire.messages.senders import FromMemoryServer
from common.wire.values.fields import (
    MAX_EVENT_KEYS,
    SHORT_KEY_BYTES,
    Codes,
    Count,
    Epoch,
    EventRuns,
    Label,
    ProcessId,
    ShortKeys,
    Total,
    WireStruct,
    WorkerId,
)
from common.wire.values.kv_layout import MAX_GROUPS, CacheKind
from common.wire.values.packing import uneven, unpack_ids

MAX_CLIENTS = 512
"""Most workers of a memory server."""


class MemoryReady(FromMemoryServer, tag=11):
    """memory server -> router: register; sent again whenever the router asks with `Reregister`."""

    pid: ProcessId
    version: Label  # Baton's
    device: Label  # same form as workers': "cpu", or "cuda:0 NVIDIA H200 GPU-<uuid>"


class GroupUse(WireStruct):
    """Use of a pool by a group of layers."""

    kind: CacheKind
    num_used_blocks: Count  # neither free nor cached
    num_bytes: Bytes  # memory that is the group's now


class MemoryHeartbeat(FromMemoryServer, tag=12):
    """memory server -> router: alive, and the use of memory."""

    weights_bytes: Bytes
    free_bytes: Bytes  # free memory of the device
    num_blocks: Count  # all KV pools
    num_free_blocks: Count
    num_cached_blocks: Count  # free blocks kept for equal prefixes
    num_offered_blocks: Count  # offers not taken by a decode worker yet
    num_quarantined_blocks: Count  # ended workers' blocks; the device may still write there
    num_host_blocks: Count  # blocks in the host tier, also or only there
    host_bytes: Bytes  # size of the host tier
    num_restored_blocks: Total  # from the host tier since the start
    copied_out_bytes: Total  # to the host tier
    copied_in_bytes: Total  # from the host tier
    worker_ids: Annotated[tuple[WorkerId, ...], Meta(max_length=MAX_CLIENTS)]
    gpu_percent: Annotated[int, Meta(ge=-1, le=100)] = -1  # recent time with a kernel running; -1: unknown
    gpu_celsius: Annotated[int, Meta(ge=-1, le=1000)] = -1  # -1: unknown
    groups: Annotated[tuple[GroupUse, ...], Meta(max_length=MAX_GROUPS)] = ()  # of the pool open to new workers


class WorkerEnded(FromMemoryServer, tag=13):
    """memory server -> router: a worker's connection ended, which the kernel does for an ended process."""

    ended_worker_id: WorkerId
    ended_epoch: Epoch


class BlockEvent(IntEnum):
    """A change of a block found by a key."""

    SEALED = 0  # found in the pool
    PARKED = 1  # only in the host tier, and can be copied back
    GONE = 2  # no longer found


class KVEvents(FromMemoryServer, tag=15):
    """memory server -> router: changes of blocks in a pool: found in the pool, found in the host tier, or gone.

    Sent after a `KVEventsWanted`, with consecutive `sequence` numbers. Sequence 0 voids all earlier events. From there
    on events list the present blocks, some at a time, mixed with new changes. After a missing number the router must
    send `KVEventsWanted` again. Every heartbeat comes with a `KVEvents`, even an empty message.
    """

    pool_id: Epoch
    sequence: Total
    kinds: Annotated[bytes, Meta(max_length=MAX_EVENT_KEYS), Codes(bytes(BlockEvent))]
    runs: EventRuns  # number of keys for each of `kinds`
    keys: ShortKeys  # ordered by time
    copy_us: Count  # to copy a block back from the host tier, in microseconds; 0: unknown

    def contradiction(self) -> str:
        num_keys, lengths = len(self.keys) // SHORT_KEY_BYTES, unpack_ids(self.runs)
        return uneven(sum(lengths), num_keys) or uneven(len(self.kinds), len(lengths))


MemoryReport = MemoryReady | MemoryHeartbeat | WorkerEnded | KVEvents
