"""Memory of the host, for memory servers of workers on a CPU, and for tests."""

import fcntl
import mmap
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from common.base.errors import MemoryShort
from common.memory.base.host_ram import meminfo
from common.memory.devices.backing import CopyFailed, HostPiece, Memory, Run, SharedPiece, gb
from common.memory.devices.gpu_gauge import GpuUse

F_SEAL_FUTURE_WRITE = 0x10  # Linux 5.1; not in every Python's fcntl
TOUCHED_AT_ONCE_BYTES = 2 * 1024 * 1024
"""Pages touched without releasing the GIL; takes fractions of a millisecond."""


class HostBacking:
    """Anonymous files: without name, without use of /dev/shm, freed after the last user."""

    settle_s = 0.0
    awake_s = 0.0
    host_pause = 0.0
    device, device_uuid = "cpu", ""

    def free_bytes(self) -> int:
        return meminfo("MemAvailable")

    def use(self) -> GpuUse:
        return GpuUse()

    def allocate(self, num_bytes: int) -> Memory:
        if num_bytes > (available := self.free_bytes()):
            total = meminfo("MemTotal")
            problem = f"{gb(num_bytes)} of host memory wanted, {gb(available)} of {gb(total)} available"
            raise MemoryShort(problem, is_for_good=num_bytes > total)
        try:
            return HostMemory(num_bytes)
        except OSError as error:
            raise MemoryShort(f"{gb(num_bytes)} of host memory wanted: {error.strerror}") from None

    def host_piece(self, num_bytes: int) -> HostPiece:
        """Make a piece of host memory with all pages touched.

        So the host's available memory tells how many more pieces fit.
        """
        content = pages(num_bytes)
        for begin in range(0, num_bytes, TOUCHED_AT_ONCE_BYTES):
            content[begin : begin + TOUCHED_AT_ONCE_BYTES : mmap.PAGESIZE] = 0
        return HostPiece(content)

    def shared_piece(self, num_bytes: int) -> SharedPiece:
        content, descriptor = shared_pages(num_bytes)
        return SharedPiece(HostPiece(content), descriptor)

    def copies(self) -> "HostCopies":
        return HostCopies()


class HostMemory:
    """An anonymous file of fixed size, so mappings stay valid."""

    handle, address = b"", 0

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.descriptor = os.memfd_create("baton", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.descriptor, num_bytes)
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        except OSError:
            self.close()
            raise

    def write(self, offset: int, data: bytes | bytearray) -> None:
        done = 0
        while done < len(data):
            done += os.pwrite(self.descriptor, data[done:], offset + done)

    def fill(self, offset: int, num_bytes: int, byte: int) -> None:
        self.write(offset, bytes([byte]) * num_bytes)

    def seal(self) -> None:
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, F_SEAL_FUTURE_WRITE)

    def close(self) -> None:
        os.close(self.descriptor)


class HostCopies:
    """Synchronous copies: over as soon as begun."""

    batch_bytes = 4 * 1024 * 1024

    def begin(self, memory: Memory, runs: Sequence[Run], *, is_out: bool) -> "Done":
        begun_s = time.perf_counter()
        for run in runs:
            _copy(memory, run, is_out=is_out)
        return Done(time.perf_counter() - begun_s)

    def finish(self) -> None:
        """Return at once, because copies are synchronous."""


@dataclass(frozen=True, slots=True)
class Done:
    """A finished copy."""

    seconds: float

    def took_s(self) -> float:
        return self.seconds


def pages(num_bytes: int) -> np.ndarray:
    """Return private memory, with large pages where supported; pages exist once touched: [num_bytes] uint8.

    Raises MemoryShort.
    """
    try:
        mapped = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryShort(f"{gb(num_bytes)} of host memory wanted: {error.strerror}") from None
    with suppress(OSError):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(mapped, np.uint8)


def shared_pages(num_bytes: int) -> tuple[np.ndarray, int]:
    """Return memory that is an anonymous file, `[num_bytes]` uint8, and the file, which others map read-only.

    Raises MemoryShort.
    """
    try:
        memory = HostMemory(num_bytes)
        try:
            content = np.frombuffer(mmap.mmap(memory.descriptor, num_bytes), np.uint8)
            with suppress(OSError):  # an older kernel cannot
                memory.seal()
        except OSError:
            memory.close()
            raise
    except OSError as error:
        raise MemoryShort(f"{gb(num_bytes)} of host memory wanted: {error.strerror}") from None
    return content, memory.descriptor


def _copy(memory: Memory, run: Run, *, is_out: bool) -> None:
    assert memory.descriptor is not None, "memory of a host is a file"
    done = 0
    while done < run.num_bytes:
        some = [run.piece.content[run.place + done : run.place + run.num_bytes].data]
        try:
            num_bytes = (os.preadv if is_out else os.pwritev)(memory.descriptor, some, run.offset + done)
        except OSError as error:
            raise CopyFailed(str(error.strerror)) from None
        done += num_bytes
