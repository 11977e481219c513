"""What a GPU can do, as far as kernels and the choice among them depend on it. Asked here and nowhere else.

Every kernel in Triton is compiled for whatever GPU there is; what differs is said by `Gpu`:

    capability  8.0      8.6, 8.9   9.0      10.0, 10.3   12.0, 12.1
    GPUs        A100     A10, L4    H100     B200, B300   5090, GB10
    shared      163 KiB  99 KiB     227 KiB  227 KiB      99 KiB
"""

from dataclasses import dataclass
from typing import Any

import torch

MIN_CAPABILITY = (8, 0)
"""Older GPUs have neither matrix products in bfloat16 nor copies into shared memory that run beside them."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU."""

    name: str
    capability: tuple[int, int]
    num_sms: int  # multiprocessors
    shared_bytes: int  # most shared memory of a program

    @property
    def is_hopper(self) -> bool:
        """Whether it runs what is written in Gluon: `wgmma`, its matrix product, no other GPU has, before or after."""
        return self.capability[0] == 9

    @property
    def has_dependent_launch(self) -> bool:
        """Whether a kernel may start while the one before it ends (see `pdl`)."""
        return self.capability >= (9, 0)


def gpu_of(device: torch.device) -> Gpu:
    """The GPU that `device` names."""
    properties: Any = torch.cuda.get_device_properties(device)  # its stub lacks a field
    return Gpu(
        name=properties.name,
        capability=(properties.major, properties.minor),
        num_sms=properties.multi_processor_count,
        shared_bytes=properties.shared_memory_per_block_optin,
    )
