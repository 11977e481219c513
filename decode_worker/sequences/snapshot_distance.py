"""Distance between two snapshots of a decoding sequence."""

from common.wire.values.kv_layout import KVLayout

DISTANCE_TOKENS = 64
"""Tokens between two snapshots.

A step reads and writes the whole state of a sequence, so copies add a 64th to that.
"""


def distance(layout: KVLayout) -> int:
    """Return the places between two snapshots."""
    return -(-DISTANCE_TOKENS // layout.block_size)
