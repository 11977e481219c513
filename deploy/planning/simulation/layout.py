"""Placement of workers on the GPUs of a host."""

import re
from dataclasses import dataclass
from typing import NamedTuple

from common.base.errors import ConfigError
from common.wire.messages.worker import Role
from deploy.processes.placement import Gpu, place_workers

FORM = re.compile(r"(\d{1,4})P(\d{1,4})D")


class Place(NamedTuple):
    """Place of a worker."""

    name: str
    role: Role
    gpu: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Workers of a host."""

    num_prefill: int
    num_decode: int
    num_gpus: int

    def __post_init__(self) -> None:
        most = self.num_gpus
        if not (1 <= self.num_prefill <= most and 1 <= self.num_decode <= most):
            raise ConfigError(f"{self.name}: 1 to {most} workers of each kind, as there are {most} GPUs")

    @property
    def name(self) -> str:
        return f"{self.num_prefill}P{self.num_decode}D, {self.num_gpus} GPU{'s' * (self.num_gpus > 1)}"

    @property
    def is_shared(self) -> bool:
        """True if some GPU has workers of both kinds."""
        return self.num_prefill + self.num_decode > self.num_gpus

    @property
    def places(self) -> list[Place]:
        """Places as by `baton serve`: prefill workers, then decode workers, round the GPUs."""
        placed = place_workers(self.num_prefill, self.num_decode, [Gpu(index, 0) for index in range(self.num_gpus)])
        return [Place(each.name, each.role, each.gpu.index) for each in placed if each.gpu is not None]


def parse_layout(text: str, num_gpus: int) -> Layout:
    """Parse `2P2D`; raises ConfigError for other text."""
    match = FORM.fullmatch(text)
    if not match:
        raise ConfigError(f"{text!r}: numbers of prefill and decode workers, for example 2P2D")
    return Layout(int(match[1]), int(match[2]), num_gpus)
