"""Slots of staging: how many, and how large, at either end of a visit."""

from typing import NamedTuple

from common.wire.values.kv_layout import KVLayout

SLOT_BYTES = 8 << 20
"""Time on a fast wire of about what it takes to ask for a slot."""
NUM_SLOTS = 8
MIN_SLOTS = 2
"""So that a slot is read while another is filled."""


class Slots(NamedTuple):
    """Slots of a staging; a block is never divided."""

    num_slots: int
    slot_bytes: int

    @property
    def num_bytes(self) -> int:
        return self.num_slots * self.slot_bytes


def slots_for(layout: KVLayout) -> Slots:
    """Return the usual slots for a layout; fewer and larger ones for larger blocks."""
    slot_bytes = max(SLOT_BYTES, *(group.block_bytes for group in layout.groups))
    return Slots(max(MIN_SLOTS, NUM_SLOTS * SLOT_BYTES // slot_bytes), slot_bytes)
