"""Placement of workers on the GPUs of hosts."""

import re
from dataclasses import dataclass

from common.base.errors import ConfigError
from common.wire.messages.worker import Role
from deploy.processes.placement import Gpu, place_workers

FORM = re.compile(r"(\d{1,4})P(\d{1,4})D")


@dataclass(frozen=True, slots=True)
class Layout:
    """Workers of each host, placed as by `baton serve`: prefill workers, then decode workers, round its GPUs.

    KV blocks move between GPUs of a host only, so each host has workers of both kinds.
    """

    num_prefill: int  # of a host
    num_decode: int
    num_gpus: int
    num_hosts: int = 1

    def __post_init__(self) -> None:
        most = self.num_gpus
        if not (1 <= self.num_prefill <= most and 1 <= self.num_decode <= most and self.num_hosts >= 1):
            raise ConfigError(f"{self.name}: on each host 1 to {most} workers of each kind, as it has {most} GPUs")

    @property
    def name(self) -> str:
        hosts = f" on each of {self.num_hosts} hosts" if self.num_hosts > 1 else ""
        gpus = f"{self.num_gpus} GPUs" if self.num_gpus > 1 else "1 GPU"
        return f"{self.num_prefill}P{self.num_decode}D, {gpus}{hosts}"

    @property
    def all_gpus(self) -> int:
        return self.num_gpus * self.num_hosts

    @property
    def is_shared(self) -> bool:
        """True if some GPU has workers of both kinds."""
        return self.num_prefill + self.num_decode > self.num_gpus

    def places(self, role: Role) -> list[int]:
        """Return the GPUs of a host's workers, by the number of the worker."""
        gpus = [Gpu(index, 0) for index in range(self.num_gpus)]
        placed = place_workers(self.num_prefill, self.num_decode, gpus)
        return [each.gpu.index for each in placed if each.role is role and each.gpu]


def parse_layout(text: str, num_gpus: int, num_hosts: int = 1) -> Layout:
    """Parse `2P2D`; raises ConfigError for other text."""
    match = FORM.fullmatch(text)
    if not match:
        raise ConfigError(f"{text!r}: numbers of prefill and decode workers, for example 2P2D")
    return Layout(int(match[1]), int(match[2]), num_gpus, num_hosts)
