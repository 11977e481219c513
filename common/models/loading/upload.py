"""Upload of parts of files to tensors on a device: each of several threads reads while its last read is copied.

Files are read, not mapped: a read copies out of the page cache at memory speed. A mapping takes a fault every few pages
and counts as memory of the process. Host memory is bounded by the staging slots, pinned for a GPU. The slots go back to
the system at the end, so torch's pinned allocator is not used, because that allocator keeps its memory.
"""

import mmap
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from common.base.errors import ModelError
from common.models.gguf.block_part import BlockPart
from common.models.quantization.groups import Held, bytes_of, elements_of
from common.models.quantization.packed_part import PackedPart, Span
from common.ops.reference import quantize

Progress = Callable[[int, int], None]
"""Called with (bytes on the device, bytes in all)."""

NUM_THREADS = 4
SLOTS_PER_THREAD = 2
SLOT_BYTES = 16 * 1024 * 1024
QUANTIZED_BYTES = 4 * 1024 * 1024
"""Of a part that is quantized on the device, where several copies in fp32 are held meanwhile."""


@dataclass(frozen=True, slots=True)
class Part:
    """Elements of a file from byte `offset` on, and the tensor to fill."""

    path: Path
    offset: int
    dtype: torch.dtype  # in the file
    target: Tensor | Held  # of any shape and strides; its elements stand in the file one behind the other
    add: float = 0.0  # to each element
    scales: Tensor | None = None  # fp32, filled if the target is of codes: as the target, but 1 for the width of rows

    @property
    def num_bytes(self) -> int:
        """Return the bytes of staging memory."""
        return elements_of(self.target) * self.dtype.itemsize

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
        """Start copying what was read to the target."""
        target, dtype = self.target, self.dtype
        if isinstance(target, Held):
            target.fill_rounded(staged[: self.num_bytes].view(dtype).to(target.codes.device, non_blocking=True))
            return
        source = staged[: self.num_bytes].view(dtype).view(target.shape)
        if self.scales is not None:
            _quantize(source.to(device, non_blocking=True), target, self.scales)
            return
        if dtype != target.dtype or not target.is_contiguous():
            source = source.to(device, non_blocking=True)  # converted, or put in order, on the device
        target.copy_(source, non_blocking=True)
        if self.add:
            target.add_(self.add)

    def split(self, max_bytes: int) -> Iterator["Part"]:
        """Yield the part in pieces of at most `max_bytes`: of some rows, or of a row that is longer.

        A row that is to be quantized is never divided.
        """
        if isinstance(self.target, Held):
            yield from self._split_held(self.target, max_bytes)
            return
        is_flat = self.target.is_contiguous() and self.scales is None
        target = self.target.view(-1) if is_flat else self.target
        row_bytes = target[:1].numel() * self.dtype.itemsize
        step = max(1, max_bytes // max(1, row_bytes))
        for begin in range(0, target.shape[0], step):
            rows = target[begin : begin + step]
            scales = None if self.scales is None else self.scales[begin : begin + step]
            part = Part(self.path, self.offset + begin * row_bytes, self.dtype, rows, self.add, scales)
            if row_bytes <= max_bytes or scales is not None:
                yield part
            else:
                yield from replace(part, target=rows[0]).split(max_bytes)

    def _split_held(self, target: Held, max_bytes: int) -> Iterator["Part"]:
        offset = self.offset
        for rows in target.split(max_bytes // self.dtype.itemsize):
            yield replace(self, offset=offset, target=rows)
            offset += elements_of(rows) * self.dtype.itemsize


def _quantize(source: Tensor, target: Tensor, scales: Tensor) -> None:
    """Fill a target of codes and its scales; rows lie along the dimension in which there is one scale."""
    sizes = zip(scales.shape, target.shape, strict=True)
    along = next((axis for axis, (num, size) in enumerate(sizes) if num != size), target.dim() - 1)
    source, target, scales = (each.movedim(along, -1) for each in (source, target, scales))
    codes, of_rows = quantize(source.reshape(-1, source.shape[-1]), target.dtype)
    target.copy_(codes.view(target.shape))
    scales.copy_(of_rows.view(scales.shape))


class Upload:
    """An upload that fills targets from construction on; targets are complete when `wait` returns.

    As a context, the upload is given up when something fails inside.

    Args:
        parts: with contiguous targets on `device`, whose memory has no other user meanwhile.
    """

    def __init__(
        self, parts: Sequence[Part | PackedPart | BlockPart], device: torch.device, progress: Progress
    ) -> None:
        self.device = device
        self.progress = progress
        self.loaded_bytes = 0
        self.total_bytes = sum(part.target_bytes for part in parts)
        pieces = [piece for part in parts for piece in part.split(_most_bytes(part))]
        self.slot_bytes = max([1, *(piece.num_bytes for piece in pieces)])
        self.parts = iter(pieces)
        self.lock = threading.Lock()
        with ExitStack() as opened:
            self.files = {path: _open(path, opened) for path in {path for part in parts for path in part.paths}}
            self.opened = opened.pop_all()
        self.pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="upload")
        self.futures = [self.pool.submit(self._work) for _ in range(NUM_THREADS)]

    def wait(self) -> None:
        """Return when all targets are on the device; raises ModelError for an unreadable file."""
        with self.opened, self.pool:
            for future in self.futures:
                future.result()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # of the threads' streams, which nobody uses again

    def cancel(self) -> None:
        """Stop reading; targets keep partial contents."""
        with self.lock:
            self.parts = iter(())
        with self.opened:
            self.pool.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.cancel()

    def _work(self) -> None:
        with ExitStack() as context:
            context.enter_context(torch.inference_mode())
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)
                context.enter_context(torch.cuda.stream(torch.cuda.Stream(self.device)))
            self._upload()

    def _upload(self) -> None:
        """Read into one slot while the other is being copied, until no part is left."""
        slots = deque(_Slot(self.slot_bytes, self.device) for _ in range(SLOTS_PER_THREAD))
        try:
            while (part := self._next()) is not None:
                slots[0].read(self.files, part)
                slots[0].fill(part)
                slots.rotate(-1)
                self._count(part)
        finally:
            for slot in slots:
                slot.close()

    def _next(self) -> Part | PackedPart | BlockPart | None:
        with self.lock:
            return next(self.parts, None)

    def _count(self, part: Part | PackedPart | BlockPart) -> None:
        with self.lock:
            self.loaded_bytes += part.target_bytes
            self.progress(self.loaded_bytes, self.total_bytes)


class _Slot:
    """Staging memory for a part between file and device."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.device = device
        self.memory = mmap.mmap(-1, num_bytes)
        self.bytes = torch.frombuffer(self.memory, dtype=torch.uint8)  # [num_bytes]
        self.copied: torch.cuda.Event | None = None
        if device.type == "cuda":
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(self.bytes.data_ptr(), num_bytes, 0))

    def read(self, files: Mapping[Path, int], part: Part | PackedPart | BlockPart) -> None:
        """Read a part, once the slot's last part has been copied out."""
        self._settle()
        for path, offset, num_bytes, place in part.spans():
            self._read(files[path], path, offset, memoryview(self.memory)[place : place + num_bytes])

    @staticmethod
    def _read(file: int, path: Path, offset: int, view: memoryview) -> None:
        begin = 0
        while begin < len(view):
            try:
                num_read = os.preadv(file, [view[begin:]], offset + begin)
            except OSError as error:
                raise ModelError(f"{path}: {error.strerror}; fetch the model again") from None
            if not num_read:
                raise ModelError(f"{path}: ends after {os.fstat(file).st_size} bytes; fetch the model again")
            begin += num_read

    def fill(self, part: Part | PackedPart | BlockPart) -> None:
        """Start copying the part just read to its targets."""
        part.fill(self.bytes, self.device)
        if self.device.type == "cuda":
            self.copied = torch.cuda.Event()
            self.copied.record()

    def close(self) -> None:
        self._settle()
        if self.device.type == "cuda":
            torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(self.bytes.data_ptr()))

    def _settle(self) -> None:
        if self.copied is not None:
            self.copied.synchronize()


def _most_bytes(part: Part | PackedPart | BlockPart) -> int:
    is_quantized = isinstance(part, Part) and (part.scales is not None or isinstance(part.target, Held))
    return min(SLOT_BYTES, QUANTIZED_BYTES) if is_quantized else SLOT_BYTES


def _open(path: Path, opened: ExitStack) -> int:
    file = opened.enter_context(path.open("rb", buffering=0))
    return file.fileno()
