"""Bytes of proof blocks: a reader of the expected bytes has mapped the right memory."""

import random
from collections.abc import Iterator

PIECE_BYTES = 32 * 1024
"""Made and compared at once; takes a fifth of a millisecond."""


def pattern(pool_id: int, block_id: int, num_bytes: int) -> bytearray:
    """Return the bytes of a proof block of a pool."""
    return bytearray().join(pattern_pieces(pool_id, block_id, num_bytes))


def pattern_pieces(pool_id: int, block_id: int, num_bytes: int) -> Iterator[bytes]:
    """Yield the bytes of a proof block, `PIECE_BYTES` at a time."""
    source = random.Random(block_id << 64 | pool_id)
    for begin in range(0, num_bytes, PIECE_BYTES):
        yield source.randbytes(min(PIECE_BYTES, num_bytes - begin))
