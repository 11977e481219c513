"""Interface of a device to its memory server: memory mapped by other processes, and copies to host memory."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from common.memory.devices.gpu_gauge import GpuUse
from common.wire.values.pool_shape import PoolShape


class Memory(Protocol):
    """Bytes owned by this process, and mapped by others."""

    @property
    def num_bytes(self) -> int: ...

    @property
    def handle(self) -> bytes:
        """CUDA IPC handle; empty if there is a descriptor."""
        ...

    @property
    def address(self) -> int:
        """Device address; 0 if there is a descriptor."""
        ...

    @property
    def descriptor(self) -> int | None:
        """Descriptor of a file; None for device memory."""
        ...

    def write(self, offset: int, data: bytes | bytearray) -> None:
        """Write bytes at an offset, in bytes."""
        ...

    def fill(self, offset: int, num_bytes: int, byte: int) -> None:
        """Set bytes from an offset to a value."""
        ...

    def seal(self) -> None:
        """Declare the memory immutable; later mappings are read-only where the system supports it."""
        ...

    def close(self) -> None:
        """Free the memory; mappings of other processes stay valid."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class HostPiece:
    """Host memory of this process alone, from and to which a device copies."""

    content: np.ndarray  # [num_bytes] uint8
    close: Callable[[], object] = lambda: None  # call after the last copy

    @property
    def address(self) -> int:
        return int(self.content.ctypes.data)


@dataclass(frozen=True, slots=True, eq=False)
class SharedPiece:
    """Host memory that other processes may map read-only, from and to which a device copies."""

    piece: HostPiece
    descriptor: int  # of its file

    def close(self) -> None:
        """Free the memory after the last copy; mappings of other processes stay valid."""
        self.piece.close()
        os.close(self.descriptor)


class Run(NamedTuple):
    """A contiguous range of bytes to copy."""

    offset: int  # in the memory, in bytes
    piece: HostPiece
    place: int  # in the piece, in bytes
    num_bytes: int


class CopyFailed(Exception):
    """The device copies no more."""


class Copy(Protocol):
    """A copy of some runs, under way or over."""

    def took_s(self) -> float | None:
        """Return the copy's duration, in seconds; None if not over. Raises CopyFailed."""
        ...


class Copies(Protocol):
    """Asynchronous copies; copies of a direction end in the order of their begin."""

    batch_bytes: int
    """Rough size of a copy, so `begin` returns soon."""

    def begin(self, memory: Memory, runs: Sequence[Run], *, is_out: bool) -> Copy:
        """Begin a copy out of the memory, or into it; raises CopyFailed."""
        ...

    def finish(self) -> None:
        """Wait until all copies are over; raises CopyFailed."""
        ...


class Backing(Protocol):
    """Source of memory; `device` is the name told to the router, `device_uuid` is "" on a CPU."""

    device: str
    device_uuid: str

    settle_s: float
    """Time for which a process may still write after its end."""

    awake_s: float
    """Time for which the server stays awake after a message (see `poller`)."""

    host_pause: float
    """Pause after making a piece of host memory, as a multiple of its duration (see `room`)."""

    def free_bytes(self) -> int:
        """Return the free bytes of the device."""
        ...

    def use(self) -> GpuUse:
        """Return the last reading of load and temperature; takes no time."""
        ...

    def allocate(self, num_bytes: int) -> Memory:
        """Allocate memory for sharing; raises MemoryShort."""
        ...

    def host_piece(self, num_bytes: int) -> HostPiece:
        """Make a piece of host memory; raises MemoryShort. Slow, so call from a thread of its own."""
        ...

    def shared_piece(self, num_bytes: int) -> SharedPiece:
        """Make the same for other processes to read."""
        ...

    def copies(self) -> Copies:
        """Return copies between memory of this backing and pieces; raises CopyFailed."""
        ...


def runs_of(shape: PoolShape, block_ids: Sequence[int], piece: HostPiece, begin: int) -> list[Run]:
    """Return copies of blocks that lie one after the other from byte `begin` of a piece; neighbours are one copy."""
    runs = list[Run]()
    for block_id in block_ids:
        offset, num_bytes = shape.place(block_id)
        if runs and runs[-1].offset + runs[-1].num_bytes == offset:
            runs[-1] = runs[-1]._replace(num_bytes=runs[-1].num_bytes + num_bytes)
        else:
            runs.append(Run(offset, piece, begin, num_bytes))
        begin += num_bytes
    return runs


def gb(num_bytes: int) -> str:
    """Format bytes for people, in GB."""
    return f"{num_bytes / 1e9:.2f} GB"
