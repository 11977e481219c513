"""Copies between a pool and host memory: what comes back is what went, on a CPU and on a GPU amid other work."""

import ctypes
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from common.base.errors import MemoryShort
from common.memory.devices.backing import Backing, Copy, CopyFailed, HostPiece, Run
from common.memory.devices.cuda_backing import CudaBacking
from common.memory.devices.host_backing import HostBacking
from common.memory.host_tier.traffic import MAX_BATCH, Traffic
from common.memory.server.pools import make_pool
from common.wire.values.pool_shape import PoolShape
from tests.support.layouts import one_group

HANDLE = ctypes.create_string_buffer(64)

DEADLINE_S = 60.0
LAYOUT = one_group("model", 4, 2, 64, 16, "float16")  # 64 KiB a block
BLOCK_BYTES = LAYOUT.groups[0].block_bytes
NUM_BLOCKS, NUM_IN_PIECE, NUM_PIECES = 65, 10, 4


def wait(traffic: Traffic, copy: Copy, block_ids: np.ndarray, *, is_out: bool) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while not traffic.is_over(copy, block_ids, is_out=is_out):
        assert time.monotonic() < end_s


def there_and_back(backing: Backing) -> None:
    """Blocks in any order to slots in any order, and from there to other blocks."""
    rng = np.random.default_rng(1)
    memory = backing.allocate(PoolShape(LAYOUT, (NUM_BLOCKS,)).num_bytes)
    pool = make_pool(PoolShape(LAYOUT, (NUM_BLOCKS,)), memory, 0.0, poisons=False)
    with ThreadPoolExecutor(1) as thread:  # which it binds to some of the cores
        sizes = [NUM_IN_PIECE * BLOCK_BYTES] * NUM_PIECES
        pieces = list(thread.map(backing.host_piece, sizes))
    traffic = Traffic(backing.copies(), pieces)
    traffic.serve(pool, NUM_IN_PIECE)
    content = rng.integers(0, 256, (30, BLOCK_BYTES), np.uint8)
    sources, targets = np.arange(1, 31), np.arange(31, 61)
    slots = np.array([*range(20), *random.Random(1).sample(range(20, 40), 10)])
    for block_id, block in zip(sources.tolist(), content, strict=True):
        memory.write(pool.index.shape.place(block_id).offset, block.tobytes())
    each = slots[:, None].tolist()
    wait(traffic, traffic.begin(sources, each, is_out=True), sources, is_out=True)
    for number, slot in enumerate(slots.tolist()):
        piece, index = divmod(slot, NUM_IN_PIECE)
        assert (pieces[piece].content[index * BLOCK_BYTES :][:BLOCK_BYTES] == content[number]).all()
    for block_id in range(1, NUM_BLOCKS):
        memory.fill(*pool.index.shape.place(block_id), 0)
    wait(traffic, traffic.begin(targets, each, is_out=False), targets, is_out=False)
    for piece in pieces:
        piece.content[:] = 0
    wait(traffic, traffic.begin(targets, each, is_out=True), targets, is_out=True)
    for number, slot in enumerate(slots.tolist()):
        index = slot % NUM_IN_PIECE * BLOCK_BYTES
        assert (pieces[slot // NUM_IN_PIECE].content[index:][:BLOCK_BYTES] == content[number]).all()
    assert traffic.num_restored == 30 and traffic.out_bytes == 2 * traffic.in_bytes == 60 * BLOCK_BYTES
    assert traffic.slot_us > 0
    for piece in pieces:
        piece.close()
    memory.close()


def test_on_a_cpu() -> None:
    there_and_back(HostBacking())


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    there_and_back(CudaBacking(0))


@pytest.mark.gpu
def test_on_a_gpu_amid_other_work() -> None:
    """Products run meanwhile, and the other way is busy, too."""
    import torch

    xs = torch.randn(4096, 4096, device="cuda")
    for _ in range(3):
        for _ in range(200):
            xs = (xs @ xs).clamp(-1, 1)
        there_and_back(CudaBacking(0))
    assert torch.isfinite(xs).all()


def test_neighbours_are_one_run_within_a_piece() -> None:
    begun: list[list[Run]] = []

    class Copies:
        batch_bytes = 1 << 30

        def begin(self, memory: object, runs: list[Run], *, is_out: bool) -> None:
            begun.append(runs)

    memory = HostBacking().allocate(PoolShape(LAYOUT, (NUM_BLOCKS,)).num_bytes)
    pool = make_pool(PoolShape(LAYOUT, (NUM_BLOCKS,)), memory, 0.0, poisons=False)
    copies: Any = Copies()
    traffic = Traffic(copies, [HostPiece(np.zeros(1, np.uint8)) for _ in range(2)])
    traffic.serve(pool, NUM_IN_PIECE)
    assert traffic.num_at_once(range(1, NUM_BLOCKS)) == MAX_BATCH
    traffic.begin(np.array([5, 6, 7, 8, 2]), [[8], [9], [10], [11], [12]], is_out=True)
    [runs] = begun
    assert [(run.offset // BLOCK_BYTES, run.place // BLOCK_BYTES, run.num_bytes // BLOCK_BYTES) for run in runs] == [
        (5, 8, 2),
        (7, 0, 2),
        (2, 2, 1),
    ]
    memory.close()


class Runtime:
    """CUDA's, whose device is the host; what is refused fails."""

    cudaError_t = SimpleNamespace(cudaSuccess=SimpleNamespace(name="cudaSuccess"), cudaErrorNotReady=object())
    cudaMemcpyKind = SimpleNamespace(cudaMemcpyHostToDevice=1, cudaMemcpyDeviceToHost=2)
    cudaHostRegisterDefault, cudaStreamNonBlocking = 0, 1
    refused = SimpleNamespace(name="cudaErrorMemoryAllocation")

    def __init__(self, *refused: str) -> None:
        self.refuses = refused
        self.memory: dict[int, Any] = {}
        self.registered: dict[int, int] = {}
        self.num_errors_asked = 0

    def __getattr__(self, name: str) -> Any:
        """Of a call that only succeeds."""
        return lambda *_: self.returns(name)

    def returns(self, name: str, *values: Any) -> tuple[Any, ...]:
        if name in self.refuses:
            return (self.refused, *(None for _ in values))
        return (self.cudaError_t.cudaSuccess, *values)

    def cudaGetDeviceProperties(self, index: int) -> tuple[Any, ...]:
        return self.returns("", SimpleNamespace(uuid=SimpleNamespace(bytes=bytes(16)), name=b"GPU"))

    def cudaMalloc(self, num_bytes: int) -> tuple[Any, ...]:
        buffer = ctypes.create_string_buffer(num_bytes)
        self.memory[ctypes.addressof(buffer)] = buffer
        return self.returns("", ctypes.addressof(buffer))

    def cudaIpcGetMemHandle(self, address: int) -> tuple[Any, ...]:
        return self.returns("", SimpleNamespace(getPtr=lambda: ctypes.addressof(HANDLE)))

    def cudaMemcpy(self, to: int, source: bytes, num_bytes: int, kind: int) -> tuple[Any, ...]:
        ctypes.memmove(to, source, num_bytes)
        return self.returns("")

    def cudaMemset(self, address: int, byte: int, num_bytes: int) -> tuple[Any, ...]:
        ctypes.memset(address, byte, num_bytes)
        return self.returns("")

    def cudaMemcpyAsync(self, to: int, source: int, num_bytes: int, kind: int, stream: int) -> tuple[Any, ...]:
        host = source if kind == self.cudaMemcpyKind.cudaMemcpyHostToDevice else to
        pinned = self.registered.items()
        assert any(begin <= host and host + num_bytes <= begin + size for begin, size in pinned), "not pinned"
        ctypes.memmove(to, source, num_bytes)
        return self.returns("cudaMemcpyAsync")

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> tuple[Any, ...]:
        self.registered[address] = num_bytes
        return self.returns("cudaHostRegister")

    def cudaHostUnregister(self, address: int) -> tuple[Any, ...]:
        del self.registered[address]
        return self.returns("")

    def cudaDeviceGetStreamPriorityRange(self) -> tuple[Any, ...]:
        return self.returns("cudaDeviceGetStreamPriorityRange", 0, -5)

    def cudaStreamCreateWithPriority(self, flags: int, priority: int) -> tuple[Any, ...]:
        return self.returns("", priority)

    def cudaEventCreate(self) -> tuple[Any, ...]:
        return self.returns("", object())

    def cudaEventElapsedTime(self, begin: object, end: object) -> tuple[Any, ...]:
        return self.returns("", 1.0)

    def cudaDeviceGetPCIBusId(self, length: int, index: int) -> tuple[Any, ...]:
        return self.returns("", b"0000:00:00.0\0")

    def cudaGetLastError(self) -> tuple[Any, ...]:
        self.num_errors_asked += 1
        return self.returns("")


def backing_of(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> CudaBacking:
    bindings: Any = ModuleType("cuda.bindings")
    bindings.runtime = runtime
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    return CudaBacking(0)


def test_by_the_calls_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime()
    there_and_back(backing_of(runtime, monkeypatch))
    assert not runtime.registered, "what was pinned is given back"


def test_memory_that_cannot_be_pinned_leaves_no_error_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime("cudaHostRegister", "cudaDeviceGetStreamPriorityRange")
    backing = backing_of(runtime, monkeypatch)
    with ThreadPoolExecutor(1) as thread:
        piece = thread.submit(backing.host_piece, 1 << 20)
    with pytest.raises(MemoryShort, match="cudaHostRegister of 1 MB: cudaErrorMemoryAllocation"):
        piece.result()
    assert runtime.num_errors_asked == 1
    with pytest.raises(CopyFailed, match="cudaErrorMemoryAllocation"):
        backing.copies()


def test_a_copy_that_cannot_be_begun_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CopyFailed, match="cudaErrorMemoryAllocation"):
        there_and_back(backing_of(Runtime("cudaMemcpyAsync"), monkeypatch))
