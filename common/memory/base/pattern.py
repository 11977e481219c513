"""Bytes that nobody else writes: who finds them in a proof block sees the memory that it was told of."""

import random
from collections.abc import Iterator

PIECE_BYTES = 32 * 1024
"""Made and compared at once: a fifth of a millisecond."""


def pattern(pool_id: int, block_id: int, num_bytes: int) -> bytearray:
    """What the owner of this pool keeps in this proof block of it."""
    return bytearray().join(pattern_pieces(pool_id, block_id, num_bytes))


def pattern_pieces(pool_id: int, block_id: int, num_bytes: int) -> Iterator[bytes]:
    """The same, `PIECE_BYTES` at a time."""
    source = random.Random(block_id << 64 | pool_id)
    for begin in range(0, num_bytes, PIECE_BYTES):
        yield source.randbytes(min(PIECE_BYTES, num_bytes - begin))
