"""Memory that other processes can map: of this host, or of a GPU."""

import fcntl
import os
import uuid
from contextlib import suppress
from typing import Any, Protocol

from common.errors import ConfigError, MemoryShort
from common.memory.vigil import gpu_awake_s

ALIGNMENT_BYTES = 2 * 1024 * 1024
"""A CUDA IPC handle exposes whole 2 MiB pieces, so memory must fill its own."""
F_SEAL_FUTURE_WRITE = 0x10  # Linux 5.1; not in every Python's fcntl


class Memory(Protocol):
    """Some bytes that this process owns."""

    @property
    def num_bytes(self) -> int: ...

    @property
    def handle(self) -> bytes:
        """Of CUDA IPC; empty where there is a descriptor."""
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


class Backing(Protocol):
    """Where memory comes from; `device` as workers name it to the router, `device_uuid` "" on a CPU."""

    device: str
    device_uuid: str

    def free_bytes(self) -> int:
        """That the device has left."""
        ...

    settle_s: float
    """How long after its end a process may still write there."""

    awake_s: float
    """How long its server sleeps for moments only after a message (see `vigil`)."""

    def allocate(self, num_bytes: int) -> Memory:
        """Raises MemoryShort."""
        ...


class HostBacking:
    """Anonymous files: they need no name and no room in /dev/shm, and end with their last user."""

    settle_s = 0.0
    awake_s = 0.0
    device, device_uuid = "cpu", ""

    def free_bytes(self) -> int:
        return _host_memory("MemAvailable")

    def allocate(self, num_bytes: int) -> Memory:
        if num_bytes > (available := self.free_bytes()):
            total = _host_memory("MemTotal")
            problem = f"{_gb(num_bytes)} of host memory wanted, {_gb(available)} of {_gb(total)} available"
            raise MemoryShort(problem, is_for_good=num_bytes > total)
        try:
            return HostMemory(num_bytes)
        except OSError as error:
            raise MemoryShort(f"{_gb(num_bytes)} of host memory wanted: {error.strerror}") from None


class HostMemory:
    """One file; its size is fixed, so that whoever maps it can count on that."""

    handle = b""

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


class CudaBacking:
    """Device memory, handed out as handles of CUDA IPC.

    What a process has launched ends with its context, and under MPS, whose server has the context, a moment later.
    """

    settle_s = 2.0

    def __init__(self, index: int) -> None:
        try:
            from cuda.bindings import runtime
        except ImportError:
            raise ConfigError('a memory server of a GPU needs the cuda extra: pip install "baton[cuda]"') from None
        self.runtime: Any = runtime
        self.awake_s = gpu_awake_s()
        (status,) = runtime.cudaSetDevice(index)
        if status != runtime.cudaError_t.cudaSuccess:
            raise ConfigError(f"memory.device = cuda:{index}: {status.name}; which GPUs does this process see?")
        _, properties = runtime.cudaGetDeviceProperties(index)
        self.device_uuid = str(uuid.UUID(bytes=properties.uuid.bytes))
        self.device = f"cuda:{index} {properties.name.decode()} {self.device_uuid}"
        with suppress(MemoryShort):  # and say now if this GPU cannot share its memory
            self.allocate(ALIGNMENT_BYTES).close()

    def free_bytes(self) -> int:
        _, free, _ = self.runtime.cudaMemGetInfo()
        return int(free)

    def allocate(self, num_bytes: int) -> Memory:
        padded = -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        status, address = self.runtime.cudaMalloc(padded)
        if status != self.runtime.cudaError_t.cudaSuccess:
            self.runtime.cudaGetLastError()
            _, free, total = self.runtime.cudaMemGetInfo()
            problem = f"{_gb(padded)} of device memory wanted, {_gb(free)} of {_gb(total)} free"
            raise MemoryShort(problem, is_for_good=padded > total)
        return CudaMemory(self.runtime, address, num_bytes)


class CudaMemory:
    """One allocation."""

    descriptor = None

    def __init__(self, runtime: Any, address: int, num_bytes: int) -> None:
        self.runtime, self.address, self.num_bytes = runtime, address, num_bytes
        status, handle = runtime.cudaIpcGetMemHandle(address)
        if status != runtime.cudaError_t.cudaSuccess:
            self.close()
            raise ConfigError(f"cudaIpcGetMemHandle: {status.name}; this GPU cannot share its memory between processes")
        self.handle = bytes(handle.reserved)

    def write(self, offset: int, data: bytes | bytearray) -> None:
        kind = self.runtime.cudaMemcpyKind.cudaMemcpyHostToDevice
        self._check(self.runtime.cudaMemcpy(self.address + offset, bytes(data), len(data), kind))

    def fill(self, offset: int, num_bytes: int, byte: int) -> None:
        self._check(self.runtime.cudaMemset(self.address + offset, byte, num_bytes))

    def seal(self) -> None:
        """CUDA IPC maps for reading and writing only."""

    def close(self) -> None:
        self.runtime.cudaFree(self.address)

    def _check(self, returned: tuple[Any]) -> None:
        """What was begun is over when this returns: who gets these bytes next may write them."""
        (status,) = returned
        if status == self.runtime.cudaError_t.cudaSuccess:
            (status,) = self.runtime.cudaDeviceSynchronize()
        if status != self.runtime.cudaError_t.cudaSuccess:
            raise ConfigError(f"device memory cannot be written: {status.name}; restart the memory server")


def make_backing(device: str) -> Backing:
    """Of `cpu` or `cuda:N`; raises ConfigError."""
    if device == "cpu":
        return HostBacking()
    return CudaBacking(int(device.partition(":")[2]))


def _host_memory(what: str) -> int:
    """In bytes, as /proc/meminfo names it."""
    with open("/proc/meminfo", encoding="ascii") as lines:
        sizes = {line.split(":")[0]: int(line.split()[1]) << 10 for line in lines}
    return sizes[what]


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"
