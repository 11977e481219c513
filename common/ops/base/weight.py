"""Matrices of products, in the schemes in which they are held."""

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

BLOCK = 128
"""Columns, or rows, that share a scale where not a whole row does."""


class Scheme(StrEnum):
    """Form of a matrix in memory: what a kernel reads."""

    PLAIN = "plain"  # elements of 16 or 32 bits
    FP8 = "fp8"  # e4m3 and scales
    INT8 = "int8"  # signed bytes and scales
    INT4 = "int4"  # packed codes of 4 bits, scales of groups; activations stay in 16 bits
    WIDE_INT8 = "wide-int8"  # packed signed bytes, scales of groups; activations stay in 16 bits
    FP4 = "fp4"  # packed e2m1, scales of groups, factors of rows; activations stay in 16 bits


SCHEMES = {torch.float8_e4m3fn: Scheme.FP8, torch.int8: Scheme.INT8, torch.uint8: Scheme.INT4}
"""Schemes of codes by their dtype; any other dtype is of plain elements."""
WEIGHT_ONLY = {Scheme.INT4: 4, Scheme.WIDE_INT8: 8, Scheme.FP4: 4}
"""Schemes of codes by which activations are multiplied as they are, and the bits of a code."""


@dataclass(frozen=True, slots=True)
class Weight:
    """A matrix that activations are multiplied by; only operations look inside.

    Elements are codes times scales where there are scales. Activations are then quantized as well, to codes of the same
    dtype: a token has a scale for all columns that share a scale here.

    Activations of a weight-only scheme are not quantized. Its scales are `[out, groups]` in fp16 or fp32, for groups of
    equally many columns, and elements are `scale * code + offset`. Codes are packed as `pack` does. Those of 4 bits are
    0 to 15, and -8 to 7 without offsets. Of FP4, codes, scales in bytes, and factors are as `floats` has them.
    """

    data: Tensor  # [out, in], contiguous: elements or codes; [out, in / 2] of 4 bits
    bias: Tensor | None = None  # [out], added to the product
    scales: Tensor | None = None  # fp32: [out, 1] of rows, [out, ceil(in / BLOCK)], or [ceil(out / BLOCK), the same]
    activations: torch.dtype | None = None  # their dtype before they are quantized; None for plain elements
    offsets: Tensor | None = None  # as `scales`, of a weight-only scheme; None: 0
    is_wide: bool = False  # tells WIDE_INT8 from INT8
    factors: Tensor | None = None  # fp32 [out, 1], of FP4

    @property
    def num_out(self) -> int:
        return self.data.shape[0]

    @property
    def num_in(self) -> int:
        return self.data.shape[1] * (2 if self.scheme in (Scheme.INT4, Scheme.FP4) else 1)

    @property
    def scheme(self) -> Scheme:
        if self.factors is not None:
            return Scheme.FP4
        return Scheme.WIDE_INT8 if self.is_wide else SCHEMES.get(self.data.dtype, Scheme.PLAIN)

    @property
    def is_weight_only(self) -> bool:
        """Tell whether the matrix is in codes, and activations are multiplied as they are."""
        return self.scheme in WEIGHT_ONLY

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of activations and of the product."""
        return self.activations or self.data.dtype

    @property
    def scale_rows(self) -> int:
        """Return the rows that share a scale."""
        return 1 if self.scales is None or self.scales.shape[0] == self.num_out else BLOCK

    @property
    def scale_columns(self) -> int:
        """Return the columns that share a scale, in quantized activations as well."""
        if self.scales is None or self.scales.shape[1] == 1:
            return self.num_in
        return self.num_in // self.scales.shape[1] if self.is_weight_only else BLOCK

    @property
    def is_grouped(self) -> bool:
        """Tell whether scales are of groups of columns or rows, not of each whole row."""
        return self.scales is not None and self.scales.shape != (self.num_out, 1)
