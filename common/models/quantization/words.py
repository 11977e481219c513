"""Formats of integers packed into words of 32 bits: of compressed-tensors, AWQ, GPTQ and Marlin. Needs no torch."""

from dataclasses import dataclass

from common.models.quantization.formats import COLUMNS, FLOATS, ROWS, WORDS, Cut, Field, divided, multiple

WORD_BITS = 32


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Integers packed along rows, lowest bits first, and offset to be positive: `w = (q - zero) * scale`.

    As compressed-tensors writes them. Zeros are packed along columns of their grid.
    """

    bits: int
    group: int  # elements of a row with a scale in common; 0: all
    rows: int = 1  # with scales in common; 0: all
    has_zeros: bool = False

    @property
    def label(self) -> str:
        return f"INT{self.bits} packed along rows, {_grouped(self.group)}"

    def fields(self, num_rows: int, width: int) -> tuple[Field, ...]:
        groups, per_word = divided(width, self.group), WORD_BITS // self.bits
        grid, cut = (num_rows, groups) if self.rows else (1, 1), ROWS if self.rows else None
        others = ((num_rows,),) if self.rows and groups == 1 else ((1,), ()) if not self.rows else ()
        fields = [
            Field(("weight_packed",), (num_rows, divided(width, per_word)), WORDS, ROWS),
            Field(("weight_scale",), grid, FLOATS, cut, others),
            Field(("weight_shape",), (1, 2), ("I64", "I32"), None, ((2,),), is_optional=True),
            Field(("weight_g_idx",), (1, width), WORDS, None, ((width,),), is_optional=True),
        ]
        if self.has_zeros:
            zeros = (multiple(num_rows, per_word), groups)
            fields.append(Field(("weight_zero_point",), zeros, WORDS, Cut(0, per_word)))
        return tuple(fields)


@dataclass(frozen=True, slots=True)
class Awq:
    """Integers of 4 bits; a word holds eight rows of a column, in an order of AWQ's own: `w = (q - zero) * scale`."""

    group: int  # elements of a row with a scale in common; 0: all
    has_zeros: bool = True  # else 8, unless a checkpoint has some

    @property
    def label(self) -> str:
        return f"INT4 of AWQ, {_grouped(self.group)}"

    def fields(self, num_rows: int, width: int) -> tuple[Field, ...]:
        words, groups = multiple(num_rows, 8), divided(width, self.group)
        return (
            Field(("qweight",), (width, words), WORDS, Cut(1, 8)),
            Field(("scales",), (groups, num_rows), FLOATS, COLUMNS),
            Field(("qzeros",), (groups, words), WORDS, Cut(1, 8), is_optional=not self.has_zeros),
        )


@dataclass(frozen=True, slots=True)
class Gptq:
    """Integers packed along a row of the matrix, lowest bits first: `w = (q - zero) * scale`.

    Columns may belong to groups in any order (`g_idx`).
    """

    bits: int
    group: int  # elements of a row with a scale in common; 0: all
    less_one: bool = True  # zeros are stored less one, as in the first version

    @property
    def label(self) -> str:
        return f"INT{self.bits} of GPTQ, {_grouped(self.group)}"

    def fields(self, num_rows: int, width: int) -> tuple[Field, ...]:
        per_word, groups = WORD_BITS // self.bits, divided(width, self.group)
        zeros = multiple(num_rows, per_word)
        return (
            Field(("qweight",), (divided(width, per_word), num_rows), WORDS, COLUMNS),
            Field(("scales",), (groups, num_rows), FLOATS, COLUMNS),
            Field(("qzeros",), (groups, zeros), WORDS, Cut(1, per_word)),
            Field(("g_idx",), (1, width), WORDS, None, ((width,),), is_optional=True),
        )


@dataclass(frozen=True, slots=True)
class Marlin:
    """Integers of 4 bits in the order of Marlin's kernel (Frantar et al., 2024): `w = (q - 8) * scale`."""

    group: int  # elements of a row with a scale in common; 0: all

    @property
    def label(self) -> str:
        return f"INT4 of Marlin, {_grouped(self.group)}"

    def fields(self, num_rows: int, width: int) -> tuple[Field, ...]:
        multiple(num_rows, 64)
        return (
            Field(("B",), (divided(width, 16), 2 * num_rows), WORDS, Cut(1, 64, 128)),
            Field(("s",), (divided(width, self.group), num_rows), FLOATS, Cut(1, 64, 64)),
        )


def _grouped(group: int) -> str:
    return f"groups of {group}" if group else "a scale a row"
