"""A flag for each row of a column, packed into bits; apart from `packing` because processes without numpy use that."""

import numpy as np


def pack_flags(flags: np.ndarray) -> bytes:
    """Return a bit for each of `[num_rows]` bool, the first in the lowest bit of the first byte."""
    return np.packbits(flags, bitorder="little").tobytes()


def unpack_flags(packed: bytes, num_rows: int) -> np.ndarray:
    """Invert `pack_flags`: [num_rows] bool."""
    return np.unpackbits(np.frombuffer(packed, np.uint8), count=num_rows, bitorder="little").view(bool)
