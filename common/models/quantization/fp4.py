"""Formats of floats of 4 bits, two in a byte, with scales of 8 bits: NVFP4 and MXFP4. Needs no torch."""

from dataclasses import dataclass

from common.models.quantization.formats import BYTES, EXPONENTS, FP8, ROWS, Field, divided


@dataclass(frozen=True, slots=True)
class Nvfp4:
    """Groups of 16 with a scale in FP8, and a scale of the whole matrix."""

    codes: str = "weight"
    matrix_scale: str = "weight_scale_2"
    divides: bool = False  # the scale of the matrix divides, as compressed-tensors has it

    @property
    def label(self) -> str:
        return "NVFP4"

    def fields(self, num_rows: int, width: int) -> tuple[Field, ...]:
        return (
            Field((self.codes,), (num_rows, divided(width, 16) * 8), BYTES, ROWS),
            Field(("weight_scale",), (num_rows, width // 16), FP8, ROWS),
            Field((self.matrix_scale,), (1, 1), ("F32",), None, ((), (1,))),
        )


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """Groups of 32 with a power of 2 as scale, as compressed-tensors has them."""

    codes: str = "weight_packed"

    @property
    def label(self) -> str:
        return "MXFP4"

    def fields(self, num_rows: int, width: int) -> tuple[Field, ...]:
        return (
            Field((self.codes,), (num_rows, divided(width, 32) * 16), BYTES, ROWS),
            Field(("weight_scale",), (num_rows, width // 32), EXPONENTS, ROWS),
        )
