"""Tensors of a checkpoint's files, and the quantized matrices that they are. Needs no torch."""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from common.models.quantization.formats import Field, Format

ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "F8_E4M3": 1, "F8_E8M0": 1, "U8": 1, "I8": 1, "I32": 4, "I64": 8}
"""Bytes of an element, by its type's name in safetensors."""
OF_CACHE = re.compile(r"\.([kv]_scale|[kv]_proj\.output_scale|kv_scale)$")
"""Names of scales of keys and values in the cache."""


class StoredTensor(NamedTuple):
    """A tensor in a file."""

    path: Path
    name: str  # in the file
    dtype: str  # as safetensors names it
    shape: tuple[int, ...]
    offset: int  # byte of the file at which it begins

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A quantized matrix `[num_rows, width]` of a checkpoint."""

    name: str
    format: Format
    num_rows: int
    width: int
    held: tuple[tuple[Field, StoredTensor], ...]

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all its tensors."""
        return sum(stored.num_bytes for _, stored in self.held)
