"""A memory server's region as a tensor."""

import mmap
import os
import warnings

import torch
from torch import Tensor

from common.base.errors import ConfigError
from common.memory.base import ipc_handle
from common.memory.client.client import Claim


class Mapping:
    """A region mapped once; its tensors are valid for the life of the process.

    Raises ConfigError if CUDA IPC cannot map the memory.
    """

    def __init__(self, claim: Claim, device: torch.device) -> None:
        self.claim, self.device = claim, device
        self.address = _opened(claim.handle, device) if device.type == "cuda" else 0

    def tensor(self, *, writable: bool) -> Tensor:
        """Return `[num_bytes]` uint8; a read-only tensor is protected on a CPU, but not by CUDA IPC."""
        if self.device.type == "cuda":
            return tensor_at(self.address, self.claim.num_bytes, self.device)
        assert self.claim.descriptor is not None, "memory of the host comes with a descriptor"
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        memory = mmap.mmap(self.claim.descriptor, self.claim.num_bytes, access=access)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given buffer is not writable")
            return torch.frombuffer(memory, dtype=torch.uint8)

    def release(self) -> None:
        """Close the descriptor; existing tensors stay valid."""
        if self.claim.descriptor is not None:
            os.close(self.claim.descriptor)


def tensor_at(address: int, num_bytes: int, device: torch.device) -> Tensor:
    """Return `[num_bytes]` uint8 over device memory not allocated by torch."""
    return torch.as_tensor(_Raw(address, num_bytes), device=device)


class _Raw:
    """Foreign memory in the form accepted by torch without a copy."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "version": 3, "strides": None,
        }  # fmt: skip


def _opened(handle: bytes, device: torch.device) -> int:
    from cuda.bindings import runtime

    torch.cuda.set_device(device)
    flags = runtime.cudaIpcMemLazyEnablePeerAccess
    status, address = runtime.cudaIpcOpenMemHandle(ipc_handle.from_bytes(handle), flags)
    if status != runtime.cudaError_t.cudaSuccess:
        raise ConfigError(
            f"cannot map memory of the memory server on {device}: {status.name}; both need to see the same GPU, "
            "and process ids that differ, as CUDA IPC takes equal ones for one process (docker: pid: host)"
        )
    return int(address)
