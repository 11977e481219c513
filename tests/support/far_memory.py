"""Memory whose ends are farther apart than 32 bits count, of which hardly any is in use."""

import mmap

import torch
from torch import Tensor

DISTANCE = 1 << 31  # bytes


def far_apart(device: torch.device, num_bytes: int) -> tuple[Tensor, Tensor]:
    """Return two places of `num_bytes` zeros, int8, the second `DISTANCE` behind the first.

    All between them is zeros, and so is `DISTANCE` before the first, where an offset of 32 bits would lead.
    """
    begin, end, size = DISTANCE, 2 * DISTANCE, 2 * DISTANCE + num_bytes
    if device.type == "cuda":
        memory = torch.zeros(size, dtype=torch.int8, device=device)
        return memory[begin : begin + num_bytes], memory[end:]
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    near, far = (torch.frombuffer(pages, dtype=torch.int8, count=num_bytes, offset=place) for place in (begin, end))
    return near, far
