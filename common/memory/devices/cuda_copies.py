"""Copies between a GPU's pool and pinned host memory, by copy engines, on a stream for each direction.

Copies into the pool have priority. A copy is a few calls, each for a run of neighbouring blocks. Two events around the
calls tell end and duration.
"""

import mmap
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import numpy as np

from common.base.errors import MemoryShort
from common.memory.devices.backing import CopyFailed, HostPiece, Run
from common.memory.devices.host_backing import pages

BUS_ID_BYTES = 32


class Addressed(Protocol):
    """Memory of a device."""

    @property
    def address(self) -> int: ...


class CudaCopies:
    """Copies of the current device.

    Args:
        runtime: `cuda.bindings.runtime`.
    """

    batch_bytes = 64 * 1024 * 1024

    def __init__(self, runtime: ModuleType) -> None:
        self.runtime = runtime
        least, greatest = _checked(runtime, runtime.cudaDeviceGetStreamPriorityRange())
        flags = runtime.cudaStreamNonBlocking
        self._out, self._in = (
            _checked(runtime, runtime.cudaStreamCreateWithPriority(flags, priority))[0]
            for priority in (least, greatest)
        )
        self._kinds = runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost, runtime.cudaMemcpyKind.cudaMemcpyHostToDevice
        self._events: list[Any] = []  # spare events

    def begin(self, memory: Addressed, runs: Sequence[Run], *, is_out: bool) -> "CudaCopy":
        runtime, base = self.runtime, memory.address
        stream, kind = (self._out, self._kinds[0]) if is_out else (self._in, self._kinds[1])
        begun = self._record(stream)
        for run in runs:
            device, host = base + run.offset, run.piece.address + run.place
            to, source = (host, device) if is_out else (device, host)
            _checked(runtime, runtime.cudaMemcpyAsync(to, source, run.num_bytes, kind, stream))
        return CudaCopy(self, begun, self._record(stream))

    def finish(self) -> None:
        for stream in (self._out, self._in):
            _checked(self.runtime, self.runtime.cudaStreamSynchronize(stream))

    def give_back(self, *events: Any) -> None:
        """Take back events to record again."""
        self._events += events

    def _record(self, stream: Any) -> Any:
        event = self._events.pop() if self._events else _checked(self.runtime, self.runtime.cudaEventCreate())[0]
        _checked(self.runtime, self.runtime.cudaEventRecord(event, stream))
        return event


@dataclass(slots=True)
class CudaCopy:
    """A copy between two events."""

    copies: CudaCopies
    begun: Any
    over: Any
    seconds: float | None = None

    def took_s(self) -> float | None:
        if self.seconds is None:
            runtime = self.copies.runtime
            (status,) = runtime.cudaEventQuery(self.over)
            if status == runtime.cudaError_t.cudaErrorNotReady:
                return None
            _checked(runtime, (status,))
            (took_ms,) = _checked(runtime, runtime.cudaEventElapsedTime(self.begun, self.over))
            self.seconds = took_ms / 1e3
            self.copies.give_back(self.begun, self.over)
        return self.seconds


def pinned_piece(runtime: ModuleType, index: int, num_bytes: int) -> HostPiece:
    """Make host memory for copies by GPU `index` (see `pinned`); raises MemoryShort."""
    return pinned(runtime, index, pages(num_bytes))


def pinned(runtime: ModuleType, index: int, content: np.ndarray) -> HostPiece:
    """Pin untouched memory for copies by GPU `index`; raises MemoryShort. For a thread of its own.

    Pages are touched before pinning, on the GPU's NUMA node, and large where the system supports large pages. So the
    pin call is short; other CUDA calls may wait for a pin call. cudaHostAlloc would do all of the work in a single
    call.
    """
    runtime.cudaSetDevice(index)
    _stay_near(runtime, index)
    content[:: mmap.PAGESIZE] = 0
    (status,) = runtime.cudaHostRegister(content.ctypes.data, content.nbytes, runtime.cudaHostRegisterDefault)
    if status != runtime.cudaError_t.cudaSuccess:
        runtime.cudaGetLastError()  # clears the error
        raise MemoryShort(f"cudaHostRegister of {content.nbytes / 1e6:.0f} MB: {status.name}")
    return HostPiece(content, partial(runtime.cudaHostUnregister, content.ctypes.data))


def _stay_near(runtime: ModuleType, index: int) -> None:
    """Run this thread on the GPU's NUMA node, if known, because the first touch places a page."""
    with suppress(OSError, ValueError):
        _, bus_id = runtime.cudaDeviceGetPCIBusId(BUS_ID_BYTES, index)
        name = (bus_id or b"").split(b"\0")[0].decode().lower()
        node = int(Path(f"/sys/bus/pci/devices/{name}/numa_node").read_text())
        if node >= 0:
            cpus = Path(f"/sys/devices/system/node/node{node}/cpulist").read_text().strip()
            os.sched_setaffinity(0, _cpus(cpus))


def _cpus(listed: str) -> set[int]:
    """Parse a list of CPUs like `0-3,8`."""
    cpus: set[int] = set()
    for part in listed.split(","):
        first, _, last = part.partition("-")
        cpus |= set(range(int(first), int(last or first) + 1))
    return cpus


def _checked(runtime: ModuleType, returned: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return results without the status; raises CopyFailed for an error status."""
    status, *rest = returned
    if status != runtime.cudaError_t.cudaSuccess:
        raise CopyFailed(status.name)
    return tuple(rest)
