"""Formats of quantized matrices: the tensors that a checkpoint has for one, with shapes and types. Needs no torch.

A format says where the rows of a matrix lie in each tensor, so that rows are read a few at a time.
"""

import math
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

FP8 = ("F8_E4M3",)
INT8 = ("I8",)
WORDS = ("I32",)
BYTES = ("U8",)
FLOATS = ("BF16", "F16", "F32")
EXPONENTS = ("F8_E8M0", "U8")
"""Types of scales that are powers of 2, with 8 bits of exponent."""


class Cut(NamedTuple):
    """Place of a matrix's rows in a tensor: each `size` elements along `axis` hold `rows` of them."""

    axis: int
    rows: int = 1
    size: int = 1


ROWS, COLUMNS = Cut(0), Cut(1)


class Field(NamedTuple):
    """A tensor of a quantized matrix in a checkpoint."""

    names: tuple[str, ...]  # behind the module's name; a checkpoint has one of them
    shape: tuple[int, int]  # as it is read
    dtypes: tuple[str, ...]  # as safetensors names them
    cut: Cut | None  # None: any rows need the whole tensor
    others: tuple[tuple[int, ...], ...] = ()  # further shapes of the same elements
    is_optional: bool = False

    @property
    def name(self) -> str:
        return self.names[0]


class Format(Protocol):
    """Layout of a stored matrix `[num_rows, width]`; equal formats are read alike."""

    @property
    def label(self) -> str:
        """Return what the format is called in messages."""
        ...

    def fields(self, num_rows: int, width: int) -> tuple[Field, ...]:
        """Return the tensors, codes first; raises ValueError for a size that the format cannot have."""
        ...


@dataclass(frozen=True, slots=True)
class Scaled:
    """A code of one byte for each element, and a scale for each block of elements: `w = code * scale`."""

    codes: tuple[str, ...]  # FP8 or INT8
    rows: int  # of a block; 0: all
    columns: int  # of a block; 0: all
    scales: tuple[str, ...] = ("weight_scale",)  # names
    scale_types: tuple[str, ...] = FLOATS
    has_zeros: bool = False  # `w = (code - zero) * scale`
    input_bits: int = field(default=16, compare=False)  # of activations, where 8 are codes of the same kind

    @property
    def label(self) -> str:
        kind = "FP8" if self.codes == FP8 else "INT8"
        if self.scale_types == EXPONENTS:
            kind = "MXFP8"
        shown = [str(size) if size else "all" for size in (self.rows, self.columns)]
        return f"{kind} with a scale for {shown[0]} rows x {shown[1]} columns"

    def fields(self, num_rows: int, width: int) -> tuple[Field, ...]:
        grid = (-(-num_rows // self.rows) if self.rows else 1, -(-width // self.columns) if self.columns else 1)
        cut = Cut(0, self.rows) if grid[0] > 1 else None
        fields = [
            Field(("weight",), (num_rows, width), self.codes, ROWS),
            Field(self.scales, grid, self.scale_types, cut, _also(grid)),
        ]
        if self.has_zeros:
            fields.append(Field(("weight_zero_point",), grid, INT8, cut, _also(grid)))
        return tuple(fields)


def _also(grid: tuple[int, int]) -> tuple[tuple[int, ...], ...]:
    """Return further shapes in which checkpoints have a grid of scales."""
    rows, columns = grid
    if grid == (1, 1):
        return (), (1,)
    if columns == 1:
        return ((rows,),)
    return ((rows, 1, columns, 1),)  # as ModelOpt writes blocks


def divided(width: int, group: int) -> int:
    """Return the groups of a row; raises ValueError for a row that they do not fill. A group of 0 is the whole row."""
    if group and width % group:
        raise ValueError(f"rows of {width} elements, a multiple of the group of {group} is needed")
    return width // group if group else 1


def multiple(num_rows: int, of: int) -> int:
    """Return how often `of` rows fit; raises ValueError unless they fill the matrix."""
    if num_rows % of:
        raise ValueError(f"{num_rows} rows, a multiple of {of} is needed")
    return num_rows // of


def finest(fields: tuple[Field, ...]) -> int:
    """Return the number of rows that every tensor can be cut by."""
    return math.lcm(*(field.cut.rows for field in fields if field.cut is not None))
