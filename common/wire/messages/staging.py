"""Messages of a peer about staging: host memory of a memory server, from which another host reads blocks of a pool."""

from typing import Annotated

from msgspec import Meta

from common.wire.values.fields import BlockIds, Count, Total, WireStruct

MAX_SLOTS = 64
MAX_STAGING_BYTES = 1 << 30

NumSlots = Annotated[int, Meta(ge=1, le=MAX_SLOTS)]
NumBytes = Annotated[int, Meta(ge=1, le=MAX_STAGING_BYTES)]


def excessive(num_slots: int, slot_bytes: int) -> str:
    """Say why a staging is too large; "" if it is not."""
    num_bytes = num_slots * slot_bytes
    return f"{num_bytes} bytes of staging, at most {MAX_STAGING_BYTES}" if num_bytes > MAX_STAGING_BYTES else ""


class StagingWanted(WireStruct, tag=89):
    """peer -> memory server, once: ask for staging, host memory into which blocks are copied for another host."""

    num_slots: NumSlots
    slot_bytes: NumBytes

    def contradiction(self) -> str:
        return excessive(self.num_slots, self.slot_bytes)


class StagingRegion(WireStruct, tag=90):
    """memory server -> peer: the staging, slot after slot; with a descriptor of a file to map."""

    num_bytes: NumBytes


class BlocksStaging(WireStruct, tag=91):
    """peer -> memory server: copy blocks into a slot of the staging, one after the other from its beginning on.

    The slot is the memory server's until `BlocksStaged`, and the peer's from then on until its next `BlocksStaging`.
    """

    number: Total  # chosen by the peer, for the answer
    slot: Count
    block_ids: BlockIds


class BlocksStaged(WireStruct, tag=92):
    """memory server -> peer: the blocks of a `BlocksStaging` are in their slot."""

    number: Total
