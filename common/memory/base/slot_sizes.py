"""Sizes of blocks in the host tier, in slots; the router and memory servers count alike."""

from common.wire.values.kv_layout import KVLayout


def slot_bytes(layout: KVLayout) -> int:
    """Return the bytes of a slot: the smallest block."""
    return min(group.block_bytes for group in layout.groups)


def block_sizes(layout: KVLayout) -> list[int]:
    """Return the slots of a block, by group."""
    return [-(-group.block_bytes // slot_bytes(layout)) for group in layout.groups]
