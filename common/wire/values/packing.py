"""Ids and numbers as they travel: int32 or fp32, little-endian, in one piece of bytes."""

from array import array
from collections.abc import Iterable


def pack_ids(ids: Iterable[int]) -> bytes:
    """Int32 little-endian bytes of token or block ids."""
    return ids.tobytes() if isinstance(ids, array) and ids.typecode == "i" else array("i", ids).tobytes()


def unpack_ids(data: bytes) -> list[int]:
    """Inverse of `pack_ids`; raises ValueError when the length is not a multiple of 4."""
    return unpack_array(data).tolist()


def unpack_array(data: bytes) -> "array[int]":
    """The same, as it is: of a long prompt no number is looked at."""
    ids = array("i")
    ids.frombytes(data)
    return ids


def pack_floats(values: Iterable[float]) -> bytes:
    """Fp32 little-endian bytes, each value rounded to it."""
    return array("f", values).tobytes()


def unpack_floats(data: bytes) -> list[float]:
    """Inverse of `pack_floats`; raises ValueError when the length is not a multiple of 4."""
    values = array("f")
    values.frombytes(data)
    return values.tolist()
