"""Packed columns of messages: ids and numbers as int32 or fp32, little-endian, in contiguous bytes.

A column has an entry for each row of a message. Relations between columns make a message valid.
"""

from array import array
from collections.abc import Iterable

ID_BYTES = 4  # bytes of a packed int32 or fp32


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


def num_ids(packed: bytes) -> int:
    return len(packed) // ID_BYTES


def uneven(*num_rows: int) -> str:
    """Require equal lengths of all columns: say why not, "" for equal lengths, as the functions below."""
    return f"columns of {', '.join(map(str, num_rows))} rows" if len(set(num_rows)) > 1 else ""


def misscored(num_rows: int, num_logprobs: bytes, logprob_ids: bytes, logprobs: bytes) -> str:
    """Require a number in `num_logprobs` for each row, and as many token ids and log-probabilities: say why not."""
    num_wanted, num_named, num_values = sum(unpack_ids(num_logprobs)), num_ids(logprob_ids), num_ids(logprobs)
    if num_wanted == num_named == num_values:
        return uneven(num_rows, num_ids(num_logprobs))
    return f"{num_values} logprobs of {num_named} ids for {num_wanted}"


def unflagged(num_rows: int, flags: bytes) -> str:
    """Require a bit for each row, in as few bytes as possible: say why not."""
    return f"{len(flags)} bytes of flags for {num_rows} rows" if len(flags) != -(-num_rows // 8) else ""


def unsealed(block_ids: bytes, generations: bytes, num_sealed: int) -> str:
    """Require a generation for each block, and at most as many sealed blocks as blocks: say why not."""
    num_blocks = num_ids(block_ids)
    if num_sealed > num_blocks:
        return f"{num_sealed} of {num_blocks} blocks are sealed"
    return uneven(num_blocks, num_ids(generations))
