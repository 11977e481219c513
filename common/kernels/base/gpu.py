"""Abilities of a GPU, as far as kernels and the choice among kernels depend on them. Asked here and nowhere else.

Triton compiles every kernel for the GPU at hand. `Gpu` describes the differences, by compute capability:

    8.0         A100        163 KiB of shared memory for a program.
    8.6, 8.9    A10, L4      99 KiB.
    9.0         H100        227 KiB.
    10.0, 10.3  B200, B300  227 KiB.
    12.0, 12.1  5090, GB10   99 KiB.
"""

from dataclasses import dataclass
from typing import Any

import torch

MIN_CAPABILITY = (8, 0)
"""Compute capability; older GPUs lack bfloat16 matrix products and asynchronous copies into shared memory."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """Name, compute capability and limits of a GPU."""

    name: str
    capability: tuple[int, int]
    num_sms: int  # multiprocessors
    shared_bytes: int  # most shared memory of a program, in bytes

    @property
    def is_hopper(self) -> bool:
        """Tell whether the GPU runs the kernels written in Gluon.

        No other GPU, before or after Hopper, has `wgmma`, the matrix product of these kernels.
        """
        return self.capability[0] == 9

    @property
    def has_e4m3(self) -> bool:
        """Tell whether the GPU converts and multiplies numbers of 8 bits (e4m3)."""
        return self.capability >= (8, 9)

    @property
    def has_dependent_launch(self) -> bool:
        """Tell whether a kernel may start while the kernel before ends (see `pdl`)."""
        return self.capability >= (9, 0)


def gpu_of(device: torch.device) -> Gpu:
    """Return the properties of `device`, a CUDA device."""
    properties: Any = torch.cuda.get_device_properties(device)  # the stub lacks a field
    return Gpu(
        name=properties.name,
        capability=(properties.major, properties.minor),
        num_sms=properties.multi_processor_count,
        shared_bytes=properties.shared_memory_per_block_optin,
    )
