"""Packing of ids and numbers for the wire: int32 or fp32, little-endian, in contiguous bytes."""

from array import array
from collections.abc import Iterable


def pack_ids(ids: Iterable[int]) -> bytes:
    """Return token or block ids as little-endian int32 bytes."""
    return ids.tobytes() if isinstance(ids, array) and ids.typecode == "i" else array("i", ids).tobytes()


def unpack_ids(data: bytes) -> list[int]:
    """Invert `pack_ids`; raises ValueError when the length is not a multiple of 4."""
    return unpack_array(data).tolist()


def unpack_array(data: bytes) -> "array[int]":
    """Return ids as an array, which is faster for a long prompt: no Python number is made."""
    ids = array("i")
    ids.frombytes(data)
    return ids


def pack_floats(values: Iterable[float]) -> bytes:
    """Return values as little-endian fp32 bytes, rounded to fp32."""
    return array("f", values).tobytes()


def unpack_floats(data: bytes) -> list[float]:
    """Invert `pack_floats`; raises ValueError when the length is not a multiple of 4."""
    values = array("f")
    values.frombytes(data)
    return values.tolist()
