"""Headers of safetensors files, read without the package and without torch; they trust no size that a file names."""

import json
import math
import os
from pathlib import Path
from typing import NamedTuple

from common.base.errors import ConfigError
from common.base.json_file import JsonObject

MAX_HEADER_BYTES = 100_000_000
"""Limit of the safetensors format."""
ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip
"""Bytes of an element, by its type's name; types that stand in fewer bits are left out."""


class Entry(NamedTuple):
    """A tensor: the type's name, the shape, and the file's bytes `[begin, end)`."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(path: Path) -> dict[str, Entry]:
    """Return the tensors of a file by name; raises ConfigError for another file, and for one that ends early."""
    with path.open("rb") as file:
        num_bytes, size = int.from_bytes(file.read(8), "little"), os.fstat(file.fileno()).st_size
        first = 8 + num_bytes
        try:
            if num_bytes > MAX_HEADER_BYTES or first > size:
                raise ValueError(f"a header of {num_bytes} bytes, in a file of {size}")
            entries = json.loads(file.read(num_bytes))
            entries.pop("__metadata__", None)
            return {name: _entry(entry, first, size) for name, entry in entries.items()}
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(f"{path}: not a safetensors file ({error!s:.200}); fetch the model again") from None


def _entry(entry: JsonObject, first: int, size: int) -> Entry:
    begin, end = (first + offset for offset in entry["data_offsets"])
    dtype, shape = str(entry["dtype"]), tuple(int(number) for number in entry["shape"])
    if not first <= begin <= end <= size:
        raise ValueError(f"tensors lie outside of its {size} bytes")
    if dtype in ITEM_BYTES and end - begin != math.prod(shape) * ITEM_BYTES[dtype]:
        raise ValueError(f"{end - begin} bytes for {list(shape)} in {dtype}")
    return Entry(dtype, shape, begin, end)
