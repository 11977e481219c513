"""What a device gives its memory server: memory that other processes can map, and copies to and from the host's."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from common.memory.devices.gpu_gauge import GpuUse


class Memory(Protocol):
    """Some bytes that this process owns."""

    @property
    def num_bytes(self) -> int: ...

    @property
    def handle(self) -> bytes:
        """Of CUDA IPC; empty where there is a descriptor."""
        ...

    @property
    def address(self) -> int:
        """On a device; 0 where there is a descriptor."""
        ...

    @property
    def descriptor(self) -> int | None:
        """Of a file."""
        ...

    def write(self, offset: int, data: bytes | bytearray) -> None:
        """Put bytes there."""
        ...

    def fill(self, offset: int, num_bytes: int, byte: int) -> None:
        """Make all bytes there the same."""
        ...

    def seal(self) -> None:
        """Nobody writes it from now on; whoever maps it later cannot, where the system can see to that."""
        ...

    def close(self) -> None:
        """Give it back; mappings of others stay what they are."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class HostPiece:
    """Host memory of this process alone, from and to which a device copies."""

    content: np.ndarray  # [num_bytes] uint8
    close: Callable[[], object] = lambda: None  # nothing is copied any more

    @property
    def address(self) -> int:
        return int(self.content.ctypes.data)


class Run(NamedTuple):
    """Bytes that lie together on both sides."""

    offset: int  # in the memory
    piece: HostPiece
    place: int  # in the piece, in bytes
    num_bytes: int


class CopyFailed(Exception):
    """The device copies no more."""


class Copy(Protocol):
    """Some runs, on their way."""

    def took_s(self) -> float | None:
        """How long it took; None while it is not over. Raises CopyFailed."""
        ...


class Copies(Protocol):
    """Begun now, and over later; those of one direction are over in the order in which they were begun."""

    batch_bytes: int
    """Of one copy, more or less, so that nobody waits for its beginning."""

    def begin(self, memory: Memory, runs: Sequence[Run], *, is_out: bool) -> Copy:
        """Out of the memory, or into it; raises CopyFailed."""
        ...

    def finish(self) -> None:
        """Wait until all are over; raises CopyFailed."""
        ...


class Backing(Protocol):
    """Where memory comes from; `device` as workers name it to the router, `device_uuid` "" on a CPU."""

    device: str
    device_uuid: str

    settle_s: float
    """How long after its end a process may still write there."""

    awake_s: float
    """How long its server sleeps for moments only after a message (see `vigil`)."""

    host_pause: float
    """How much longer than to make a piece of host memory takes the pause after it is (see `host_room`)."""

    def free_bytes(self) -> int:
        """That the device has left."""
        ...

    def use(self) -> GpuUse:
        """How busy and how warm the device is, as it was read last; takes no time."""
        ...

    def allocate(self, num_bytes: int) -> Memory:
        """Raises MemoryShort."""
        ...

    def host_piece(self, num_bytes: int) -> HostPiece:
        """Raises MemoryShort; for a thread of its own, as it takes long."""
        ...

    def copies(self) -> Copies:
        """Between memory that was allocated here and such pieces; raises CopyFailed."""
        ...


def gb(num_bytes: int) -> str:
    """As people read it."""
    return f"{num_bytes / 1e9:.2f} GB"
