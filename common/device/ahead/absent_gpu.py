"""GPUs that are not there, as torch and Triton describe GPUs, so that kernels compile for them on any machine."""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from common.kernels.base.gpu import Gpu

META = torch.device("meta")


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU and its memory in bytes."""

    gpu: Gpu
    memory_bytes: int


def _card(name: str, capability: tuple[int, int], num_sms: int, shared_kib: int, memory_gib: float) -> Card:
    return Card(Gpu(name, capability, num_sms, shared_kib << 10), int(memory_gib * (1 << 30)))


CARDS = (
    _card("NVIDIA A100-SXM4-80GB", (8, 0), 108, 163, 79.3),
    _card("NVIDIA A10", (8, 6), 72, 99, 22.1),
    _card("NVIDIA L4", (8, 9), 58, 99, 22.0),
    _card("NVIDIA H200", (9, 0), 132, 227, 139.8),
    _card("NVIDIA H100 80GB HBM3", (9, 0), 132, 227, 79.1),
    _card("NVIDIA B200", (10, 0), 148, 227, 178.4),
    _card("NVIDIA GeForce RTX 5090", (12, 0), 170, 99, 31.4),
)
"""Known cards; what is compiled for a card follows from its capability, its limits, and tuned plans by its name."""


def cards_of(capability: str) -> list[Card]:
    """Return the known cards of a compute capability such as `9.0`."""
    return [card for card in CARDS if ".".join(map(str, card.gpu.capability)) == capability]


class AbsentDriver:
    """Triton's driver of a GPU that is not there."""

    def __init__(self, gpu: Gpu) -> None:
        self.arch = gpu.capability[0] * 10 + gpu.capability[1]

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return self.arch  # Triton keeps compiled kernels apart by device

    def get_current_stream(self, device: int) -> int:
        return 0


def pretend(card: Card) -> None:
    """Have torch and Triton of this process describe any device as `card`."""
    gpu = card.gpu
    properties: Any = SimpleNamespace(
        name=gpu.name,
        major=gpu.capability[0],
        minor=gpu.capability[1],
        multi_processor_count=gpu.num_sms,
        shared_memory_per_block_optin=gpu.shared_bytes,
        total_memory=card.memory_bytes,
    )
    driver.set_active(AbsentDriver(gpu))
    described: Any = lambda device: properties  # noqa: E731 - named, because torch's function has another type
    torch.cuda.get_device_properties = described


def compile_instead_of_launching(report: Callable[[Any], None] = lambda kernel: None) -> None:
    """Have each kernel that would be launched compiled in this process, reported, and returned by its launch."""
    run = JITFunction.run

    def compiled(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        report(kernel)
        return kernel

    JITFunction.run = compiled
