"""Rows of a tensor in blocks: what to read of a file, and where the plain rows go."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from common.base.errors import ModelError
from common.checkpoint.gguf.block_types import BlockType
from common.models.gguf.unpacking import Unpack, bad_block
from common.models.quantization.groups import Held, bytes_of, elements_of
from common.models.quantization.packed_part import MAX_ELEMENTS, Span
from common.ops.reference import quantize


@dataclass(frozen=True, slots=True)
class BlockPart:
    """Whole blocks of a file from byte `offset` on, and the tensor to fill with their elements."""

    path: Path
    offset: int
    type: BlockType
    unpack: Unpack
    target: Tensor | Held  # of any shape and strides; its elements stand in the file one behind the other
    add: float = 0.0  # to each element
    scales: Tensor | None = None  # fp32, filled if the target is of codes: as the target, but 1 instead of the width
    name: str = ""  # of the file's tensor, for errors
    keeps_codes: bool = False  # of the file, in a target of integers; other codes are made

    @property
    def num_bytes(self) -> int:
        """Return the bytes of staging memory."""
        return self.type.bytes_of(elements_of(self.target))

    @property
    def target_bytes(self) -> int:
        """Return the bytes filled on the device."""
        return bytes_of(self.target)

    @property
    def paths(self) -> set[Path]:
        return {self.path}

    def spans(self) -> Iterator[Span]:
        """Yield what to read."""
        yield Span(self.path, self.offset, self.num_bytes, 0)

    def fill(self, staged: Tensor, device: torch.device) -> None:
        """Start copying what was read to the device, and making it plain there; raises ModelError for bad scales.

        Args:
            staged: the staging memory, uint8.
        """
        if (bad := bad_block(staged[: self.num_bytes], self.type)) is not None:
            raise ModelError(
                f"{self.path}: {self.name} has a scale that is not a finite number, in the block at byte "
                f"{self.offset + bad * self.type.num_bytes}; fetch the model again"
            )
        blocks = staged[: self.num_bytes].to(device, non_blocking=True).view(-1, self.type.num_bytes)
        groups, target = self.unpack(blocks), self.target
        if isinstance(target, Held):
            if self.keeps_codes:
                target.fill(groups.in_rows(elements_of(target) // target.width))
            else:
                target.fill_rounded(groups.elements)
        elif self.scales is not None:
            codes, scales = quantize(groups.elements.view(-1, target.shape[-1]), target.dtype)
            target.copy_(codes.view(target.shape))
            self.scales.copy_(scales.view(self.scales.shape))
        else:
            target.copy_(groups.elements.view(target.shape))
            if self.add:
                target.add_(self.add)

    def split(self, max_bytes: int) -> Iterator["BlockPart"]:
        """Yield the part in pieces of at most `max_bytes` and `MAX_ELEMENTS`, or of a block.

        A piece has some rows, some blocks of contiguous rows, or a part of a row that is longer. A row that is to be
        quantized is never divided.
        """
        if isinstance(self.target, Held):
            yield from self._split_held(self.target, max_bytes)
            return
        is_flat = self.target.is_contiguous() and self.scales is None
        target = self.target.view(-1, self.type.num_elements) if is_flat else self.target
        row_elements = target[:1].numel()
        row_bytes = self.type.bytes_of(row_elements)
        step = min(max_bytes // row_bytes, MAX_ELEMENTS // row_elements)
        is_block = row_elements == self.type.num_elements
        for begin in range(0, target.shape[0], max(1, step)):
            rows = target[begin : begin + max(1, step)]
            scales = None if self.scales is None else self.scales[begin : begin + max(1, step)]
            part = replace(self, offset=self.offset + begin * row_bytes, target=rows, scales=scales)
            if step or is_block or (scales is not None and rows.dim() == 2):
                yield part
            else:
                yield from replace(part, target=rows[0], scales=None if scales is None else scales[0]).split(max_bytes)

    def _split_held(self, target: Held, max_bytes: int) -> Iterator["BlockPart"]:
        most = min(MAX_ELEMENTS, max_bytes // self.type.num_bytes * self.type.num_elements)
        offset = self.offset
        for rows in target.split(most):
            yield replace(self, offset=offset, target=rows)
            offset += self.type.bytes_of(elements_of(rows))
