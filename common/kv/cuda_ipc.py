"""Pools in GPU memory, mapped through a memory server's CUDA IPC handle, from the same GPU or another.

A pull launches a gather kernel for each group over the mapping, on a stream of its own. The caller does not wait:
`done` polls an event.
"""

import torch
from cuda.bindings import driver, runtime
from torch import Tensor

from common.base.errors import TransferFailed
from common.kernels.elementwise.gather_blocks import gather_blocks
from common.kv.pool import KVPool
from common.kv.transport import check_size, pairs_by_group
from common.memory.base import ipc_handle
from common.memory.client.client import PoolClaim


class CudaPeerPool:
    """A peer's device memory, mapped."""

    proof_bytes = 256 << 20

    def __init__(self, claim: PoolClaim, worker_id: str, device: torch.device) -> None:
        try:
            handle = ipc_handle.from_bytes(claim.handle)
        except ValueError as error:
            raise TransferFailed(f"pool of worker {worker_id}: {error}") from None
        torch.cuda.set_device(device)
        self.device = device
        self.shape = claim.shape
        self.stream = torch.cuda.Stream(device)
        status, self.address = runtime.cudaIpcOpenMemHandle(handle, runtime.cudaIpcMemLazyEnablePeerAccess)
        if status != runtime.cudaError_t.cudaSuccess:
            raise TransferFailed(
                f"cannot map the pool of worker {worker_id}: {status.name}; both workers need to see both GPUs and "
                "process ids that differ from its memory server's (docker: pid: host)"
            )
        try:
            if (num_bytes := _mapped_bytes(self.address)) is not None:
                check_size(claim, worker_id, num_bytes)
        except TransferFailed:
            self.close()
            raise

    def is_open(self, target: KVPool) -> bool:
        return True

    def pull(self, source_ids: list[int], target: KVPool, target_ids: list[int]) -> "CudaPull":
        """Launch a gather kernel for each group with blocks."""
        groups = pairs_by_group(self.shape, source_ids, target.shape, target_ids)
        pinned = [torch.tensor(pair, dtype=torch.int32).pin_memory() for pair in groups]  # each [2, num_pulled]
        with torch.cuda.stream(self.stream):
            begin = _recorded(self.stream)
            uploaded = [ids_cpu.to(self.device, non_blocking=True) for ids_cpu in pinned]
            for ids, blocks in zip(uploaded, target.blocks, strict=True):
                gather_blocks(self.address, ids[0], blocks, ids[1])
            return CudaPull(begin, _recorded(self.stream), (pinned, uploaded))

    def close(self) -> None:
        """Wait for pulls under way, and unmap."""
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


def _recorded(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event


def _mapped_bytes(address: int) -> int | None:
    """Return the number of mapped bytes from an address on; None if the driver cannot tell."""
    try:
        status, base, num_bytes = driver.cuMemGetAddressRange(address)
    except RuntimeError:  # the driver lacks the function
        return None
    return int(base) + int(num_bytes) - address if status == driver.CUresult.CUDA_SUCCESS else None


open_peer = CudaPeerPool
