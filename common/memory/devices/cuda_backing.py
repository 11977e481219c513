"""Memory of a GPU, shared by CUDA IPC."""

import os
import uuid
from contextlib import suppress
from types import ModuleType
from typing import Any

from common.base.errors import ConfigError, MemoryShort
from common.memory.base import ipc_handle
from common.memory.base.poller import gpu_awake_s
from common.memory.devices.backing import HostPiece, Memory, SharedPiece, gb
from common.memory.devices.cuda_copies import CudaCopies, pinned, pinned_piece
from common.memory.devices.gpu_gauge import GpuGauge, GpuUse
from common.memory.devices.host_backing import shared_pages

ALIGNMENT_BYTES = 2 * 1024 * 1024
"""A CUDA IPC handle exposes whole 2 MiB pieces, so each allocation fills its pieces."""


class CudaBacking:
    """Device memory, shared as CUDA IPC handles.

    Work launched by a process ends with its context. Under MPS the context is the MPS server's, and ends a moment
    later.
    """

    settle_s = 2.0
    host_pause = 1.0

    def __init__(self, index: int) -> None:
        try:
            from cuda.bindings import runtime
        except ImportError:
            raise ConfigError('a memory server of a GPU needs the cuda extra: pip install "baton[cuda]"') from None
        self.runtime: ModuleType = runtime
        self.index = index
        self.awake_s = gpu_awake_s()
        (status,) = runtime.cudaSetDevice(index)
        if status != runtime.cudaError_t.cudaSuccess:
            raise ConfigError(f"memory.device = cuda:{index}: {status.name}; which GPUs does this process see?")
        _, properties = runtime.cudaGetDeviceProperties(index)
        self.device_uuid = str(uuid.UUID(bytes=properties.uuid.bytes))
        self.device = f"cuda:{index} {properties.name.decode()} {self.device_uuid}"
        self._gauge = GpuGauge(self.device_uuid)
        with suppress(MemoryShort):  # raises ConfigError now if this GPU cannot share memory
            self.allocate(ALIGNMENT_BYTES).close()

    def free_bytes(self) -> int:
        _, free, _ = self.runtime.cudaMemGetInfo()
        return int(free)

    def use(self) -> GpuUse:
        return self._gauge.now

    def allocate(self, num_bytes: int) -> Memory:
        padded = -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        status, address = self.runtime.cudaMalloc(padded)
        if status != self.runtime.cudaError_t.cudaSuccess:
            self.runtime.cudaGetLastError()
            _, free, total = self.runtime.cudaMemGetInfo()
            problem = f"{gb(padded)} of device memory wanted, {gb(free)} of {gb(total)} free"
            raise MemoryShort(problem, is_for_good=padded > total)
        return CudaMemory(self.runtime, address, num_bytes)

    def host_piece(self, num_bytes: int) -> HostPiece:
        return pinned_piece(self.runtime, self.index, num_bytes)

    def shared_piece(self, num_bytes: int) -> SharedPiece:
        content, descriptor = shared_pages(num_bytes)
        try:
            return SharedPiece(pinned(self.runtime, self.index, content), descriptor)
        except MemoryShort:
            os.close(descriptor)
            raise

    def copies(self) -> CudaCopies:
        return CudaCopies(self.runtime)


class CudaMemory:
    """An allocation of device memory."""

    descriptor = None

    def __init__(self, runtime: ModuleType, address: int, num_bytes: int) -> None:
        self.runtime, self.address, self.num_bytes = runtime, address, num_bytes
        status, handle = runtime.cudaIpcGetMemHandle(address)
        if status != runtime.cudaError_t.cudaSuccess:
            self.close()
            raise ConfigError(f"cudaIpcGetMemHandle: {status.name}; this GPU cannot share its memory between processes")
        self.handle = ipc_handle.to_bytes(handle)

    def write(self, offset: int, data: bytes | bytearray) -> None:
        kind = self.runtime.cudaMemcpyKind.cudaMemcpyHostToDevice
        self._check(self.runtime.cudaMemcpy(self.address + offset, bytes(data), len(data), kind))

    def fill(self, offset: int, num_bytes: int, byte: int) -> None:
        self._check(self.runtime.cudaMemset(self.address + offset, byte, num_bytes))

    def seal(self) -> None:
        """CUDA IPC has no read-only mappings."""

    def close(self) -> None:
        self.runtime.cudaFree(self.address)

    def _check(self, returned: tuple[Any]) -> None:
        """Wait for the operation, because the next owner may write the memory; raises ConfigError if it failed."""
        (status,) = returned
        if status == self.runtime.cudaError_t.cudaSuccess:
            (status,) = self.runtime.cudaDeviceSynchronize()
        if status != self.runtime.cudaError_t.cudaSuccess:
            raise ConfigError(f"device memory cannot be written: {status.name}; restart the memory server")
