"""Matrices as codes in groups of neighbouring columns, each with a scale and perhaps an offset."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from common.ops.base import pack, pack_quarters

MIDDLE = 8
"""Added to signed codes of 4 bits where they are packed."""


class Groups(NamedTuple):
    """Rows of a matrix: an element is `code * scale + offset`, with its group's scale and offset.

    Codes of 4 bits are -8 to 7 without offsets, and 0 to 15 with them.
    """

    codes: Tensor  # int8 [num_rows, groups, columns of a group]
    scales: Tensor  # fp32 [num_rows, groups]
    offsets: Tensor | None = None  # as the scales; None for 0

    @property
    def elements(self) -> Tensor:
        """Return the plain elements in fp32: `[num_rows, width]`."""
        rows = self.codes.float().mul_(self.scales[..., None])
        if self.offsets is not None:
            rows.add_(self.offsets[..., None])
        return rows.flatten(1)

    def part(self, rows: slice) -> "Groups":
        """Return some rows."""
        return Groups(self.codes[rows], self.scales[rows], None if self.offsets is None else self.offsets[rows])

    def in_rows(self, num_rows: int) -> "Groups":
        """Return the groups of a tensor with several blocks a row, whose blocks stand here as rows."""
        beside = [None if each is None else each.reshape(num_rows, -1) for each in (self.scales, self.offsets)]
        scales, offsets = beside
        assert scales is not None
        return Groups(self.codes.reshape(num_rows, -1, self.codes.shape[-1]), scales, offsets)


class Floats(NamedTuple):
    """Rows of a matrix in floats of 4 bits, as `common.ops.base.floats` has them."""

    codes: Tensor  # uint8 [num_rows, groups, columns of a group], the sign lowest
    scales: Tensor  # uint8 [num_rows, groups]
    factors: Tensor  # fp32 [num_rows, 1]

    def part(self, rows: slice) -> "Floats":
        """Return some rows."""
        return Floats(*(each[rows] for each in self))


class Held(NamedTuple):
    """Memory of a matrix's rows in codes in groups; of any strides, with the rows in the order of the file."""

    codes: Tensor  # packed: int8 [..., width], or of 4 bits uint8 [..., width / 2]
    scales: Tensor  # [..., groups], as many as the rows' own groups or a multiple of them
    offsets: Tensor | None = None  # as the scales
    factors: Tensor | None = None  # [..., 1], of floats
    in_quarters: bool = False  # codes of 4 bits are packed as those of experts

    @property
    def width(self) -> int:
        """Return the elements of a row."""
        return self.codes.shape[-1] * (2 if self.codes.dtype == torch.uint8 else 1)

    def part(self, rows: slice | int) -> "Held":
        """Return some rows, or one entry of the first dimension."""
        offsets, factors = (None if each is None else each[rows] for each in (self.offsets, self.factors))
        return self._replace(codes=self.codes[rows], scales=self.scales[rows], offsets=offsets, factors=factors)

    def matrices(self, num: int) -> Iterator["Held"]:
        """Yield equally large matrices whose rows stand one behind the other."""
        codes, scales, offsets, factors = (
            None if each is None else each.view(num, -1, each.shape[-1])
            for each in (self.codes, self.scales, self.offsets, self.factors)
        )
        assert codes is not None and scales is not None
        stacked = self._replace(codes=codes, scales=scales, offsets=offsets, factors=factors)
        return map(stacked.part, range(num))

    def split(self, max_elements: int) -> Iterator["Held"]:
        """Yield pieces of at most `max_elements`, or of a row."""
        step = max_elements // elements_of(self.part(0))
        for begin in range(0, self.codes.shape[0], max(1, step)):
            rows = self.part(slice(begin, begin + max(1, step)))
            if step or rows.codes.dim() == 2:
                yield rows
            else:
                yield from rows.part(0).split(max_elements)

    def fill(self, rows: Groups) -> None:
        """Write rows; those without offsets get them if there is memory for offsets."""
        codes, offsets = rows.codes.flatten(1), rows.offsets
        if self.codes.dtype == torch.uint8:
            if offsets is None:
                codes, offsets = codes + MIDDLE, rows.scales * -MIDDLE
            codes = codes.view(torch.uint8)
        self._fill(codes, rows.scales)
        if self.offsets is not None:
            self.offsets.copy_(_spread(torch.zeros_like(rows.scales) if offsets is None else offsets, self.offsets))

    def fill_floats(self, rows: Floats) -> None:
        """Write rows of floats."""
        assert self.factors is not None, "memory of floats"
        self._fill(rows.codes.flatten(1), rows.scales)
        self.factors.copy_(rows.factors.view(self.factors.shape))

    def _fill(self, codes: Tensor, scales: Tensor) -> None:
        """Write codes `[num_rows, width]`, packed, and scales of their groups."""
        packed = pack_quarters(codes) if self.in_quarters else pack(codes)
        self.codes.copy_(packed.view(self.codes.shape))
        self.scales.copy_(_spread(scales, self.scales))

    def fill_rounded(self, rows: Tensor) -> None:
        """Write plain rows `[num_rows, width]` as codes of 4 bits, rounded to the nearest."""
        self.fill(rounded(rows.view(-1, self.width), self.scales.shape[-1]))


def elements_of(target: Tensor | Held) -> int:
    """Return the elements that a target stands for."""
    if isinstance(target, Held):
        return target.codes.numel() // target.codes.shape[-1] * target.width
    return target.numel()


def bytes_of(target: Tensor | Held) -> int:
    """Return the bytes of a target."""
    held = (target,) if isinstance(target, Tensor) else (target.codes, target.scales, target.offsets, target.factors)
    return sum(each.numel() * each.itemsize for each in held if each is not None)


def _spread(numbers: Tensor, target: Tensor) -> Tensor:
    """Return numbers of groups, repeated for the smaller groups of a target."""
    return numbers.repeat_interleave(target.shape[-1] // numbers.shape[1], 1).view(target.shape)


def rounded(rows: Tensor, num_groups: int) -> Groups:
    """Return rows `[num_rows, width]` as codes of 4 bits, rounded to the nearest, with scales that float16 holds.

    The number of largest magnitude becomes code -8, by a scale of the other sign, because there are more codes below 0.
    """
    groups = rows.float().unflatten(1, (num_groups, -1))
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    scales = (largest / -8.0).half().float()
    codes = (groups / torch.where(scales == 0, 1.0, scales)).round().clamp(-8, 7)
    return Groups(codes.to(torch.int8), scales[..., 0])
