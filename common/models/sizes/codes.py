"""Forms of matrices in memory that are held in codes. Needs no torch."""

from enum import Enum, auto
from typing import NamedTuple

ITEM_BYTES = {"float8_e4m3fn": 1, "int8": 1, "uint8": 1, "float4_e2m1fn_x2": 1, "float16": 2, "float32": 4}
"""Bytes of codes, of scales, of offsets and of factors, by dtype."""
PAIRS = "uint8"
"""Dtype of integers of 4 bits, two in a byte."""
FLOATS = "float4_e2m1fn_x2"
"""Dtype of floats of 4 bits, two in a byte."""
BLOCK = 128
"""Rows and columns of the blocks of FP8 that kernels multiply by."""


class Codes(NamedTuple):
    """Form of a matrix: an element is its code times a scale, times its row's factor, plus an offset.

    Without factors or offsets these are left out. Codes stand for themselves, FLOATS for values of e2m1.
    """

    dtype: str  # of codes
    rows: int  # that share a scale
    columns: int  # that share a scale; 0: all
    scale_dtype: str = "float32"
    offset_dtype: str = ""  # "": no offsets
    factor_dtype: str = ""  # "": no factors

    @property
    def is_weight_only(self) -> bool:
        """Tell whether codes are in groups of columns, and inputs stay as they are."""
        return self.has_pairs or (self.dtype == "int8" and self.columns > 0)

    @property
    def has_pairs(self) -> bool:
        """Tell whether a byte has two codes."""
        return self.dtype in (PAIRS, FLOATS)

    @property
    def label(self) -> str:
        """Return what the form is called in the log."""
        kind = {"float8_e4m3fn": "FP8", "int8": "INT8", PAIRS: "INT4", FLOATS: "FP4"}[self.dtype]
        return f"{kind} in groups of {self.columns}" if self.is_weight_only else kind

    def dtype_of(self, role: "Role") -> str:
        """Return the dtype of one of the tensors that hold a matrix."""
        return {
            Role.CODES: self.dtype,
            Role.SCALES: self.scale_dtype,
            Role.OFFSETS: self.offset_dtype,
            Role.FACTORS: self.factor_dtype,
        }[role]

    def shape_of(self, role: "Role", num_rows: int, width: int) -> tuple[int, int]:
        """Return the shape of one of the tensors that hold a matrix `[num_rows, width]`."""
        if role is Role.CODES:
            return num_rows, width // 2 if self.has_pairs else width
        if role is Role.FACTORS:
            return num_rows, 1
        return -(-num_rows // self.rows), -(-width // self.columns) if self.columns else 1


class Role(Enum):
    """Part of a matrix in codes that a tensor holds."""

    CODES = auto()
    SCALES = auto()
    OFFSETS = auto()
    FACTORS = auto()
