"""Rows of a quantized matrix: what to read of a checkpoint, and where the plain rows go."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from common.base.errors import ModelError
from common.models.quantization.dequantize import TYPES, as_stored, dequantize, in_groups, needless, problem
from common.models.quantization.floats import in_floats
from common.models.quantization.formats import Cut, Field, Scaled, finest
from common.models.quantization.fp4 import Mxfp4, Nvfp4
from common.models.quantization.groups import Held, bytes_of
from common.models.quantization.stored import PackedMatrix
from common.ops.base import BLOCK
from common.ops.reference import quantize

MAX_ELEMENTS = 2 * 1024 * 1024
"""Of rows made plain at once; a few copies in fp32 are held meanwhile."""
ALIGNMENT_BYTES = 16


class Span(NamedTuple):
    """Bytes of a file, and the byte of the staging memory at which they go."""

    path: Path
    offset: int
    num_bytes: int
    place: int


@dataclass(frozen=True, slots=True)
class Target:
    """Rows `[begin, end)` of a matrix, and where they go."""

    begin: int
    end: int
    tensor: Tensor | Held  # [end - begin, ...], as many elements a row as the matrix has, in their order
    scales: Tensor | None = None  # fp32, filled if the tensor is of codes: of rows, or of BLOCK rows if they are kept
    keeps_codes: bool = False  # of the checkpoint; other codes are made


@dataclass(frozen=True, slots=True)
class PackedPart:
    """Rows `[begin, end)` of a quantized matrix, and where they go: as they are, plain, or quantized anew."""

    matrix: PackedMatrix
    begin: int
    end: int
    targets: tuple[Target, ...]

    @property
    def paths(self) -> set[Path]:
        return {stored.path for _, stored in self.matrix.held}

    @property
    def num_bytes(self) -> int:
        """Return the bytes of staging memory."""
        *_, end = self._places()
        return end

    @property
    def target_bytes(self) -> int:
        """Return the bytes filled on the device."""
        return sum(bytes_of(self._part(each)) for each in self.targets)

    def split(self, max_bytes: int) -> Iterator["PackedPart"]:
        """Yield the part in pieces of at most `max_bytes`, or of as few rows as the format can be cut by."""
        fields = tuple(field for field, _ in self.matrix.held)
        step, num_rows = finest(fields), self.end - self.begin
        by_bytes = max_bytes * num_rows // self.num_bytes
        most = max(step, min(by_bytes, MAX_ELEMENTS // self.matrix.width) // step * step)
        for begin in range(self.begin, self.end, most):
            end = min(begin + most, self.end)
            targets = tuple(each for each in self.targets if each.begin < end and begin < each.end)
            if targets:
                yield PackedPart(self.matrix, begin, end, targets)

    def spans(self) -> Iterator[Span]:
        """Yield what to read: all bytes of a tensor's rows at once, and a tensor's columns row by row."""
        for (field, stored), place in zip(self.matrix.held, self._places(), strict=False):
            (first_row, num_rows), (first, num) = self._ranges(field)
            size, width = TYPES[stored.dtype].itemsize, field.shape[1]
            if num == width:
                first, num, num_rows, first_row, width = first_row * width, num * num_rows, 1, 0, 0
            for row in range(num_rows):
                offset = stored.offset + ((first_row + row) * width + first) * size
                yield Span(stored.path, offset, num * size, place + row * num * size)

    def fill(self, staged: Tensor, device: torch.device) -> None:
        """Start to copy what was read to the device, and to fill targets; raises ModelError for bad scales and codes.

        Args:
            staged: the staging memory, uint8.
        """
        on_host = self._tensors(staged)
        if wrong := problem(on_host, (self.matrix.num_rows, self.matrix.width), self.begin):
            paths = ", ".join(sorted({path.name for path in self.paths}))
            raise ModelError(f"{self.matrix.name}: {wrong}, in {paths}; fetch the model again")
        tensors = self._tensors(staged[: self.num_bytes].to(device, non_blocking=True))
        for name in needless(on_host):
            del tensors[name]
        for each in (each for each in self.targets if each.keeps_codes):
            self._keep(each, tensors)
        others = [each for each in self.targets if not each.keeps_codes]
        if not others:
            return
        rows = dequantize(self.matrix.format, tensors, self.end - self.begin, self.matrix.width)
        for each in others:
            target, plain = self._part(each), rows[self._taken(each)]
            if isinstance(target, Held):
                target.fill_rounded(plain)
            elif each.scales is None:
                target.copy_(plain.view(target.shape))
            else:
                codes, scales = quantize(plain.reshape(-1, target.shape[-1]), target.dtype)
                target.copy_(codes.view(target.shape))
                of_rows = each.scales[self._rows_of(each)]
                of_rows.copy_(scales.view(of_rows.shape))

    def _keep(self, target: Target, tensors: Mapping[str, Tensor]) -> None:
        """Copy codes and scales as they are; rows share a scale where a target has one for BLOCK of them."""
        rows, format_, num_rows = self._taken(target), self.matrix.format, self.end - self.begin
        part = self._part(target)
        if isinstance(part, Held) and isinstance(format_, Nvfp4 | Mxfp4):
            part.fill_floats(in_floats(format_, tensors, num_rows).part(rows))
            return
        if isinstance(part, Held):
            groups = in_groups(format_, tensors, num_rows, has_offsets=part.offsets is not None)
            part.fill(groups.part(rows))
            return
        assert isinstance(format_, Scaled) and target.scales is not None, "codes with scales"
        codes, scales = as_stored(format_, tensors, num_rows)
        part.copy_(codes[rows])
        each = 1 if target.scales.shape[0] == target.end - target.begin else BLOCK
        begin = (max(self.begin, target.begin) - target.begin) // each
        of_blocks = scales[rows][::each]
        target.scales[begin : begin + of_blocks.shape[0]].copy_(of_blocks)

    def _taken(self, target: Target) -> slice:
        """Return the rows of this part that a target takes."""
        return slice(max(self.begin, target.begin) - self.begin, min(self.end, target.end) - self.begin)

    def _part(self, target: Target) -> Tensor | Held:
        rows = self._rows_of(target)
        return target.tensor.part(rows) if isinstance(target.tensor, Held) else target.tensor[rows]

    def _rows_of(self, target: Target) -> slice:
        """Return the rows of a target that are of this part."""
        return slice(max(self.begin - target.begin, 0), self.end - target.begin)

    def _tensors(self, staged: Tensor) -> dict[str, Tensor]:
        tensors = {}
        for (field, stored), place in zip(self.matrix.held, self._places(), strict=False):
            (_, num_rows), (_, num) = self._ranges(field)
            dtype = TYPES[stored.dtype]
            tensor = staged[place : place + num_rows * num * dtype.itemsize].view(dtype)
            tensors[field.name] = tensor.view(num_rows, num)
        return tensors

    def _places(self) -> Iterator[int]:
        """Yield the byte at which each tensor lies in the staging memory, and the end of all."""
        place = 0
        for field, stored in self.matrix.held:
            yield place
            (_, num_rows), (_, num) = self._ranges(field)
            end = place + num_rows * num * TYPES[stored.dtype].itemsize
            place = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        yield place

    def _ranges(self, field: Field) -> list[tuple[int, int]]:
        """Return the first row and the number of rows needed of a tensor, and of columns alike."""
        whole = [(0, size) for size in field.shape]
        if field.cut is not None:
            whole[field.cut.axis] = self._range(field.cut)
        return whole

    def _range(self, cut: Cut) -> tuple[int, int]:
        first, end = self.begin // cut.rows * cut.size, -(-self.end // cut.rows) * cut.size
        return first, end - first
