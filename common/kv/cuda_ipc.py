"""Pools in GPU memory that a peer maps through a CUDA IPC handle, on the same GPU or another one.

The pool is one raw `cudaMalloc`: torch's caching allocator may hand out segments that legacy IPC
cannot export. A pull is one kernel that gathers all blocks of a request over the mapping, on a
stream of its own; nobody waits for it, `done` polls an event.
"""

import os
from typing import Any

import torch
from cuda.bindings import driver, runtime
from torch import Tensor

from common.errors import ConfigError, TransferFailed
from common.kernels.gather_blocks import gather_blocks
from common.kv.blocks import check_sources
from common.kv.pool import KVPool
from common.kv.transport import check_size, pairs_by_group, shape_of
from common.memory.mapping import tensor_at
from common.wire.handoff_messages import KVPoolExport

ALIGNMENT_BYTES = 2 * 1024 * 1024
"""A handle exposes whole 2 MiB pieces, so a pool must fill its own."""


class CudaMemory:
    """Device memory that this process owns."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        torch.cuda.set_device(device)
        padded = -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        status, self.address = runtime.cudaMalloc(padded)
        if status != runtime.cudaError_t.cudaSuccess:
            raise ConfigError(
                f"cudaMalloc of {padded} bytes on {device}: {_text(status)}; lower kv.memory_fraction or kv.pool_bytes"
            )
        self.tensor = tensor_at(self.address, num_bytes, device)

    def handle(self) -> bytes:
        status, handle = runtime.cudaIpcGetMemHandle(self.address)
        if status != runtime.cudaError_t.cudaSuccess:
            raise TransferFailed(f"cudaIpcGetMemHandle: {_text(status)}")
        return bytes(handle.reserved)

    def close(self) -> None:
        runtime.cudaFree(self.address)


class CudaPeerPool:
    """A peer's device memory, mapped."""

    def __init__(self, export: KVPoolExport, device: torch.device) -> None:
        if export.pid == os.getpid():
            raise TransferFailed(
                f"worker {export.worker_id} has our process id {export.pid} in another PID namespace, and CUDA IPC "
                "takes the two for one process; share the PID namespace (docker: pid: host)"
            )
        if len(export.handle) != 64:
            raise TransferFailed(f"a CUDA IPC handle has 64 bytes, worker {export.worker_id} sent {len(export.handle)}")
        torch.cuda.set_device(device)
        self.device = device
        self.shape = shape_of(export)
        self.stream = torch.cuda.Stream(device)
        handle = runtime.cudaIpcMemHandle_t()
        handle.reserved = export.handle
        status, self.address = runtime.cudaIpcOpenMemHandle(handle, runtime.cudaIpcMemLazyEnablePeerAccess)
        if status != runtime.cudaError_t.cudaSuccess:
            raise TransferFailed(
                f"cannot map the pool of worker {export.worker_id} on GPU {export.device_uuid}: {_text(status)}; both "
                "workers need to see both GPUs and to share the PID and IPC namespaces (docker: pid: host, ipc: host)"
            )
        try:
            if (num_bytes := _mapped_bytes(self.address)) is not None:
                check_size(export, num_bytes)
        except TransferFailed:
            self.close()
            raise

    def pull(self, source_ids: list[int], target: KVPool, target_ids: list[int]) -> "CudaPull":
        """One gather kernel for each group that has some."""
        check_sources(source_ids, self.shape.num_ids)
        groups = pairs_by_group(self.shape, source_ids, target.shape, target_ids)
        pinned = [torch.tensor(pair, dtype=torch.int32).pin_memory() for pair in groups]  # each [2, num_pulled]
        with torch.cuda.stream(self.stream):
            begin = _recorded(self.stream)
            uploaded = [ids_cpu.to(self.device, non_blocking=True) for ids_cpu in pinned]
            for ids, blocks, offset in zip(uploaded, target.blocks, self.shape.offsets, strict=False):
                gather_blocks(self.address + offset, ids[0], blocks, ids[1])
            return CudaPull(begin, _recorded(self.stream), (pinned, uploaded))

    def close(self) -> None:
        self.stream.synchronize()
        runtime.cudaIpcCloseMemHandle(self.address)


class CudaPull:
    """A gather kernel under way; keeps its operands alive."""

    def __init__(
        self, begin: torch.cuda.Event, end: torch.cuda.Event, operands: tuple[list[Tensor], list[Tensor]]
    ) -> None:
        self.begin, self.end, self.operands = begin, end, operands

    def done(self) -> bool:
        return bool(self.end.query())

    def duration_s(self) -> float:
        return float(self.begin.elapsed_time(self.end)) / 1e3


class CudaIpcTransport:
    """The `cuda_ipc` entry of `TRANSPORTS`."""

    name = "cuda_ipc"

    def allocate(self, num_bytes: int, device: torch.device, label: str) -> CudaMemory:
        return CudaMemory(num_bytes, device)

    def open_peer(self, export: KVPoolExport, device: torch.device) -> CudaPeerPool:
        return CudaPeerPool(export, device)


def _recorded(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event


def _mapped_bytes(address: int) -> int | None:
    """How much is mapped from there on; None where the driver cannot say."""
    try:
        status, base, num_bytes = driver.cuMemGetAddressRange(address)
    except RuntimeError:  # it has no such function
        return None
    return int(base) + int(num_bytes) - address if status == driver.CUresult.CUDA_SUCCESS else None


def _text(status: Any) -> str:
    return f"{status.name}"


TRANSPORT = CudaIpcTransport()
