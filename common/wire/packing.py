"""Token and block ids as they travel: int32, little-endian, in one piece of bytes."""

from array import array
from collections.abc import Iterable


def pack_ids(ids: Iterable[int]) -> bytes:
    """Int32 little-endian bytes of token or block ids."""
    return array("i", ids).tobytes()


def unpack_ids(data: bytes) -> list[int]:
    """Inverse of `pack_ids`; raises ValueError when the length is not a multiple of 4."""
    ids = array("i")
    ids.frombytes(data)
    return ids.tolist()
