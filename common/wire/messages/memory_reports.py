"""What a memory server tells the router: that it is there, how full, whose process has ended, and which blocks it has.

It speaks in its own name: `server_id` and `epoch`, a new one at each start. The rules are those of `messages`.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated

from common.wire.messages.memory import Bytes
from common.wire.values.fields import (
    MAX_EVENT_KEYS,
    Codes,
    Count,
    Epoch,
    EventRuns,
    Label,
    Length,
    ProcessId,
    Range,
    ShortKeys,
    WorkerId,
)

Total = Annotated[int, Range(0, 1 << 62)]
MAX_WORKERS = 512
"""That one memory server names."""


@dataclass(frozen=True, slots=True)
class MemoryReady:
    """memory server -> router: register; sent again whenever the router asks with `Reregister`."""

    server_id: WorkerId
    epoch: Epoch
    pid: ProcessId
    version: Label  # of Baton
    device: Label  # as workers on it say: "cpu", or "cuda:0 NVIDIA H200 GPU-<uuid>"


@dataclass(frozen=True, slots=True)
class MemoryHeartbeat:
    """memory server -> router: alive, and how full."""

    server_id: WorkerId
    epoch: Epoch
    weights_bytes: Bytes
    free_bytes: Bytes  # that the device has left
    num_blocks: Count  # of KV pools
    num_free_blocks: Count
    num_cached_blocks: Count  # of those, what is kept for texts that begin alike
    num_offered_blocks: Count  # that no decode worker has taken over yet
    num_quarantined_blocks: Count  # of workers that are gone, and may still be written
    num_host_blocks: Count  # that are in host memory, too, or only there
    host_bytes: Bytes  # of host memory that there is for them
    num_restored_blocks: Total  # that came back from there, since the start
    copied_out_bytes: Total  # to host memory
    copied_in_bytes: Total  # and back
    worker_ids: Annotated[tuple[WorkerId, ...], Length(0, MAX_WORKERS)]
    gpu_percent: Annotated[int, Range(-1, 100)] = -1  # of the last moments in which kernels ran; -1: nobody says
    gpu_celsius: Annotated[int, Range(-1, 1000)] = -1


@dataclass(frozen=True, slots=True)
class WorkerEnded:
    """memory server -> router: this worker hung up on it, which is what the kernel does for a process that ends."""

    server_id: WorkerId
    epoch: Epoch
    ended_worker_id: WorkerId
    ended_epoch: Epoch


class BlockEvent(IntEnum):
    """What became of a block that can be found by a key."""

    SEALED = 0  # it is in the pool
    PARKED = 1  # it is in host memory only, from where it can be copied back
    GONE = 2  # it is found no more


@dataclass(frozen=True, slots=True)
class KVEvents:
    """memory server -> router: which blocks of a pool can be found from now on, and where, and which not any more.

    Sent after a `KVEventsWanted`, each with the next `sequence`. What was told before that of sequence 0 is void; it
    and those behind it tell of the blocks that are there, some at a time, and of what happens meanwhile. Where one is
    missing, all must be asked for again. One comes with each heartbeat, though nothing may have happened.
    """

    server_id: WorkerId
    epoch: Epoch
    pool_id: Epoch
    sequence: Total
    kinds: Annotated[bytes, Codes(BlockEvent, MAX_EVENT_KEYS)]
    runs: EventRuns  # of so many keys, each of one kind
    keys: ShortKeys  # in the order in which it happened
    copy_us: Count  # what copying a block back from host memory takes; 0 where that is not known


MemoryReport = MemoryReady | MemoryHeartbeat | WorkerEnded | KVEvents
