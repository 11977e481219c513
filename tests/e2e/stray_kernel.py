"""A kernel that touches what it may not, so that the device ends this process's context."""

import torch
import triton
import triton.language as tl

FAR = 1 << 45
"""Bytes behind a tensor: nothing is mapped there."""


@triton.jit
def _store_kernel(pointer, offset):  # type: ignore[no-untyped-def]
    tl.store(pointer + offset, 1)


def meet_fault(device: torch.device) -> None:
    """Raises what the runtime raises, now and ever after."""
    _store_kernel[(1,)](torch.zeros(1, dtype=torch.uint8, device=device), FAR)
    torch.cuda.synchronize(device)
