"""What becomes of a wish for memory that a host or a GPU has not got."""

import ctypes
import errno
import mmap
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from common.base.errors import ConfigError, MemoryShort
from common.memory.devices.cuda_backing import ALIGNMENT_BYTES, CudaBacking
from common.memory.devices.host_backing import HostBacking

HANDLE = ctypes.create_string_buffer(64)

FREE_BYTES = 10 * ALIGNMENT_BYTES


@pytest.mark.parametrize("call", ["memfd_create", "ftruncate"])
def test_a_host_without_memory_or_files_says_so_and_keeps_nothing(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def short(*_: object) -> int:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    num_files = len(list(Path("/proc/self/fd").iterdir()))
    monkeypatch.setattr(os, call, short)
    with pytest.raises(MemoryShort, match=r"0\.00 GB of host memory wanted: Cannot allocate memory"):
        HostBacking().allocate(1000)
    assert len(list(Path("/proc/self/fd").iterdir())) == num_files


def test_more_than_the_host_has_is_not_even_tried() -> None:
    with pytest.raises(MemoryShort, match=r"17592\.19 GB of host memory wanted, .* GB of .* GB available") as short:
        HostBacking().allocate(1 << 44)
    assert short.value.is_for_good


def test_what_the_host_has_and_is_in_use_may_come_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostBacking, "free_bytes", lambda _: 1000)
    with pytest.raises(MemoryShort, match=r"0\.00 GB of host memory wanted") as short:
        HostBacking().allocate(1001)
    assert not short.value.is_for_good


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_a_piece_of_host_memory_is_there_when_it_is_made() -> None:
    before = resident_bytes()
    piece = HostBacking().host_piece(64 << 20)
    assert resident_bytes() - before > 48 << 20, "or more would be promised than the host has"
    assert not piece.content.any()


class Runtime(SimpleNamespace):
    """CUDA's, with a little memory."""

    def __init__(self, handle_status: int = 0) -> None:
        self.allocated: dict[int, int] = {}
        success, failure = SimpleNamespace(name="cudaSuccess"), SimpleNamespace(name="cudaErrorNotSupported")
        statuses = [success, failure]
        uuid, handle = SimpleNamespace(bytes=bytes(16)), SimpleNamespace(getPtr=lambda: ctypes.addressof(HANDLE))
        super().__init__(
            allocated=self.allocated,
            cudaError_t=SimpleNamespace(cudaSuccess=success),
            cudaSetDevice=lambda index: (statuses[index > 0],),
            cudaGetDeviceProperties=lambda index: (success, SimpleNamespace(uuid=uuid, name=b"GPU")),
            cudaMemGetInfo=lambda: (success, FREE_BYTES - sum(self.allocated.values()), FREE_BYTES),
            cudaGetLastError=lambda: (success,),
            cudaMalloc=lambda num_bytes: self._malloc(num_bytes, success, failure),
            cudaFree=self.allocated.pop,
            cudaIpcGetMemHandle=lambda address: (statuses[handle_status], handle),
        )

    def _malloc(self, num_bytes: int, success: object, failure: object) -> tuple[object, int]:
        if num_bytes + sum(self.allocated.values()) > FREE_BYTES:
            return failure, 0
        address = len(self.allocated) + 1
        self.allocated[address] = num_bytes
        return success, address


def backing(runtime: Runtime, monkeypatch: pytest.MonkeyPatch, index: int = 0) -> CudaBacking:
    bindings: Any = ModuleType("cuda.bindings")
    bindings.runtime = runtime
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    return CudaBacking(index)


def test_a_gpu_without_memory_says_how_much_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime()
    device = backing(runtime, monkeypatch)
    assert not runtime.allocated and device.free_bytes() == FREE_BYTES
    device.allocate(FREE_BYTES - ALIGNMENT_BYTES)
    with pytest.raises(MemoryShort, match=r"0\.00 GB of device memory wanted, 0\.00 GB of 0\.02 GB free"):
        device.allocate(ALIGNMENT_BYTES + 1)
    for num_bytes in (FREE_BYTES, FREE_BYTES + 1):
        with pytest.raises(MemoryShort) as short:
            device.allocate(num_bytes)
        assert short.value.is_for_good == (num_bytes > FREE_BYTES)


def test_a_gpu_that_cannot_share_its_memory_ends_the_server_before_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime(handle_status=1)
    with pytest.raises(ConfigError, match="cannot share its memory between processes"):
        backing(runtime, monkeypatch)
    assert not runtime.allocated
    with pytest.raises(ConfigError, match=r"memory\.device = cuda:1: cudaErrorNotSupported"):
        backing(Runtime(), monkeypatch, 1)
