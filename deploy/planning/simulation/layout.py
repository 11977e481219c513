"""Placement of workers on the GPUs of hosts."""

import re
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from common.base.errors import ConfigError
from common.wire.messages.worker import Role
from deploy.processes.placement import Gpu, spread_workers

FORM = re.compile(r"(\d{1,4})P(\d{1,4})D")


class Place(NamedTuple):
    """Place of a worker."""

    name: str
    role: Role
    gpu: int  # counted over all hosts
    host: int = 0


@dataclass(frozen=True, slots=True)
class Layout:
    """Workers of hosts, each with as many GPUs.

    Each host has its part of the workers of either kind. With `is_spread`, prefill workers are on the first hosts.
    """

    num_prefill: int
    num_decode: int
    num_gpus: int  # of all hosts
    num_hosts: int = 1
    is_spread: bool = False

    def __post_init__(self) -> None:
        most = self.num_gpus
        if not (1 <= self.num_prefill <= most and 1 <= self.num_decode <= most):
            raise ConfigError(f"{self.name}: 1 to {most} workers of each kind, as there are {most} GPUs")
        if most % self.num_hosts:
            raise ConfigError(f"{self.name}: each host has as many GPUs")
        if self.is_spread and self.num_prefill + self.num_decode > most:
            raise ConfigError(f"{self.name}: workers of either kind have GPUs of their own if they are spread")

    @property
    def name(self) -> str:
        hosts = f", {self.num_hosts} hosts" if self.num_hosts > 1 else ""
        return f"{self.num_prefill}P{self.num_decode}D, {self.num_gpus} GPU{'s' * (self.num_gpus > 1)}{hosts}"

    @property
    def gpus_of_host(self) -> int:
        return self.num_gpus // self.num_hosts

    @property
    def is_shared(self) -> bool:
        """True if some GPU has workers of both kinds."""
        return any(sum(part) > self.gpus_of_host for part in self.parts)

    @property
    def parts(self) -> list[tuple[int, int]]:
        """Prefill and decode workers of each host."""
        if self.is_spread:
            return self._in_order()
        prefills, decodes = (_shared_out(count, self.num_hosts) for count in (self.num_prefill, self.num_decode))
        return list(zip(prefills, reversed(decodes), strict=True))

    @property
    def places(self) -> list[Place]:
        """Places as by `baton serve` and `baton join`: prefill workers, then decode workers, round each host's GPUs."""
        found, numbers = list[Place](), Counter[Role]()
        for host, (num_prefill, num_decode) in enumerate(self.parts):
            first = host * self.gpus_of_host
            gpus = [Gpu(index, 0) for index in range(first, first + self.gpus_of_host)]
            for each in spread_workers(num_prefill, num_decode, gpus):
                if each.gpu is not None:
                    found.append(Place(f"{each.role.label}-{numbers[each.role]}", each.role, each.gpu.index, host))
                    numbers[each.role] += 1
        return sorted(found, key=lambda place: place.role)

    def _in_order(self) -> list[tuple[int, int]]:
        """Return the workers of each host, filled with prefill workers, then with decode workers."""
        left, parts = [self.num_prefill, self.num_decode], []
        for _ in range(self.num_hosts):
            prefill = min(left[0], self.gpus_of_host)
            decode = min(left[1], self.gpus_of_host - prefill)
            left = [left[0] - prefill, left[1] - decode]
            parts.append((prefill, decode))
        return parts


def _shared_out(count: int, num_hosts: int) -> list[int]:
    """Return a count's parts of each host, as equal as can be, larger ones first."""
    return [count // num_hosts + (host < count % num_hosts) for host in range(num_hosts)]


def parse_layout(text: str, num_gpus: int, num_hosts: int = 1, *, is_spread: bool = False) -> Layout:
    """Parse `2P2D`, on so many GPUs of each host; raises ConfigError for other text."""
    match = FORM.fullmatch(text)
    if not match:
        raise ConfigError(f"{text!r}: numbers of prefill and decode workers, for example 2P2D")
    return Layout(int(match[1]), int(match[2]), num_gpus * num_hosts, num_hosts, is_spread)
