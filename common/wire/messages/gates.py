"""Messages between a worker and the gate of another host's memory server; `worker` has the rules for all messages.

A gate passes messages between a worker and a memory server (see `memory`), each in a `GateFrame`. Frames are numbered
from 0 in each direction, because a connection may lose frames and come back. A gap ends the visit, and its claims.
"""

from typing import Annotated

from msgspec import Meta

from common.wire.messages.senders import FromWorker
from common.wire.messages.staging import MAX_SLOTS, MAX_STAGING_BYTES, excessive
from common.wire.values.fields import Epoch, Label, Text, Total, WireStruct

MAX_METADATA_BYTES = 1 << 16

Metadata = Annotated[bytes, Meta(min_length=1, max_length=MAX_METADATA_BYTES)]
Frame = Annotated[bytes, Meta(min_length=1)]


class GateVisit(FromWorker, tag=85):
    """worker -> gate, first: open a visit to a pool, as `MemoryVisit` does inside a host."""

    visit: Epoch  # random; names the visit in all further messages
    pool_id: Epoch
    ucx_transports: Label  # both ends must have the same
    num_slots: Annotated[int, Meta(ge=0, le=MAX_SLOTS)] = 0  # of staging; 0 to read the pool itself
    slot_bytes: Annotated[int, Meta(ge=0, le=MAX_STAGING_BYTES)] = 0

    def contradiction(self) -> str:
        if bool(self.num_slots) != bool(self.slot_bytes):
            return f"{self.num_slots} slots of {self.slot_bytes} bytes"
        return excessive(self.num_slots, self.slot_bytes)


class PoolLent(WireStruct, tag=87):
    """gate -> worker: the agent that lends the pool, for the life of the visit."""

    visit: Epoch
    metadata: Metadata  # of NIXL
    address: Total  # of the pool's memory or of the staging, in the agent's process
    num_bytes: Total  # of that memory


class GateFrame(WireStruct, tag=86):
    """worker -> gate -> memory server, and back: a message of a visit."""

    visit: Epoch
    number: Total
    frame: Frame


class StagingFrame(WireStruct, tag=93):
    """worker -> gate -> memory server, and back: a `BlocksStaging` or `BlocksStaged` of a visit.

    Has a socket of its own in the worker, whose thread need not wait for the worker's loop. The answer goes to the
    socket that asked last. A lost frame stops a pull, and never spoils one.
    """

    visit: Epoch
    frame: Frame


class GateOver(WireStruct, tag=88):
    """gate -> worker, and back: the visit is over; all its claims end."""

    visit: Epoch
    reason: Text


GateMessage = GateVisit | PoolLent | GateFrame | StagingFrame | GateOver
