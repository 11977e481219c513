"""Placement of workers on GPUs, their shares of the machine, and the workers to run: pure rules, no processes."""

import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import count

from common.base.errors import ConfigError
from common.models.forms import OLDEST, Capability
from common.wire.messages.worker import Role

SERVER_BYTES = 600 * 10**6
"""Bytes of a memory server on a GPU beside the weights."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as numbered by CUDA here; `memory_bytes` is 0 if unknown, `capability` then the least that is served."""

    index: int
    memory_bytes: int
    capability: Capability = OLDEST


@dataclass(frozen=True, slots=True)
class Placement:
    """Place of a worker. `gpu` is None on a CPU; `standby` is the value of `worker.standby`."""

    name: str
    role: Role
    gpu: Gpu | None
    standby: int = 0

    @property
    def device(self) -> str:
        """Device as in a worker's option."""
        return "cpu" if self.gpu is None else f"cuda:{self.gpu.index}"


def choose_gpus(device: str, wanted: str, detected: Sequence[Gpu]) -> list[Gpu]:
    """Return the GPUs to spread workers over; empty means CPU.

    Args:
        device: `auto`, `cpu`, `cuda` or `cuda:N`.
        wanted: comma-separated indices, or empty for all detected GPUs.
        detected: the machine's GPUs.
    """
    if device not in ("auto", "cpu", "cuda") and not re.fullmatch(r"cuda:\d+", device):
        raise ConfigError(f"device {device!r}: auto, cpu, cuda or cuda:N")
    if device == "cpu" or (device == "auto" and not wanted and not detected):
        return []
    if device.startswith("cuda:"):
        wanted = wanted or device.removeprefix("cuda:")
    known = {gpu.index: gpu for gpu in detected}
    if not known:
        raise ConfigError("no GPU was found (nvidia-smi, /dev/nvidia*); use --device cpu")
    try:
        indices = [int(part) for part in wanted.split(",")] if wanted else list(known)
    except ValueError:
        raise ConfigError(f"GPUs {wanted!r}: comma-separated indices, for example 0,1") from None
    missing = [str(index) for index in indices if index not in known]
    if missing:
        raise ConfigError(f"no GPU {', '.join(missing)}; this machine has {', '.join(map(str, known))}")
    return [known[index] for index in indices]


def place_workers(num_prefill: int, num_decode: int, gpus: Sequence[Gpu]) -> list[Placement]:
    """Place the workers of a system, of which one decodes at least."""
    if num_prefill < 0 or num_decode < 1:
        raise ConfigError(f"{num_prefill} prefill and {num_decode} decode workers: at least 0 and 1")
    return spread_workers(num_prefill, num_decode, gpus)


def spread_workers(num_prefill: int, num_decode: int, gpus: Sequence[Gpu]) -> list[Placement]:
    """Place prefill workers, then decode workers, round robin over `gpus`."""
    roles = [Role.PREFILL] * num_prefill + [Role.DECODE] * num_decode
    numbers = [*range(num_prefill), *range(num_decode)]
    return [
        Placement(f"{role.label}-{number}", role, gpus[position % len(gpus)] if gpus else None)
        for position, (role, number) in enumerate(zip(roles, numbers, strict=True))
    ]


def place_standbys(
    workers: Sequence[Placement], roles: Collection[Role], before: Sequence[Placement] = ()
) -> list[Placement]:
    """Place a standby of each role on each device with workers of the role.

    Args:
        before: present standbys; a standby staying on its device keeps its name.
    """
    peers = Counter((each.role, each.gpu) for each in workers if each.role in roles)
    names = {(each.role, each.gpu): each.name for each in before if (each.role, each.gpu) in peers}
    for role, gpu in peers:
        names.setdefault((role, gpu), free_name(f"{role.label}-standby", names.values()))
    return [Placement(names[role, gpu], role, gpu, num_peers) for (role, gpu), num_peers in peers.items()]


def free_name(stem: str, taken: Collection[str]) -> str:
    """Return the first free name of `stem`-0, `stem`-1 and so on; reuse keeps metric labels few."""
    return next(name for name in (f"{stem}-{number}" for number in count()) if name not in taken)


def in_either_role(placements: Sequence[Placement]) -> list[Placement]:
    """Return all possible placements when workers change roles: each worker in both roles, and standbys.

    A device never has more workers of a role at once, even during a change.
    """
    workers = [each for each in placements if not each.standby]
    gpus = dict.fromkeys(each.gpu for each in workers)
    roles = sorted({each.role for each in placements if each.standby})
    return [
        *(Placement(f"{role.label}-{n}", role, each.gpu) for n, each in enumerate(workers) for role in Role),
        *(Placement(f"{role.label}-standby-{n}", role, gpu, 1) for n, gpu in enumerate(gpus) for role in roles),
    ]


def memory_fraction(gpu: Gpu, total: float, weights_bytes: int) -> float:
    """Return the share of a GPU's memory for its workers with weights: `total` without the memory server.

    Raises ConfigError if the weights leave less than a tenth of `total`.
    """
    if not gpu.memory_bytes:
        return total
    share = total - SERVER_BYTES / gpu.memory_bytes
    if share - weights_bytes / gpu.memory_bytes < 0.1 * total:
        raise ConfigError(
            f"GPU {gpu.index}: {weights_bytes / 1e9:.1f} GB of weights do not leave room for KV in {total:.0%} of "
            f"{gpu.memory_bytes / 1e9:.1f} GB; use a smaller model, or raise kv.memory_fraction"
        )
    return int(share * 10_000) / 10_000  # rounded down


def threads_per_worker(num_cores: int, num_workers: int) -> int:
    """Return the CPU threads for each of `num_workers` workers on `num_cores` cores."""
    return max(1, num_cores // num_workers)


@dataclass(frozen=True, slots=True)
class Staff:
    """Workers by name, and standbys; immutable, so a change makes a new staff."""

    workers: dict[str, Placement]
    standbys: tuple[Placement, ...] = ()
    standby_roles: frozenset[Role] = frozenset()  # roles with a standby on each of their devices

    @classmethod
    def of(cls, placements: Sequence[Placement]) -> "Staff":
        standbys = tuple(each for each in placements if each.standby)
        workers = {each.name: each for each in placements if not each.standby}
        return cls(workers, standbys, frozenset(each.role for each in standbys))

    def changed(self, name: str, role: Role, taken: Collection[str]) -> tuple["Staff", Placement]:
        """Return the staff with worker `name` replaced by a worker of `role` on its device, and the new worker.

        Args:
            taken: names of processes, not available for the new worker.
        """
        successor = replace(self.workers[name], name=free_name(role.label, {*self.workers, *taken}), role=role)
        workers = {each: placement for each, placement in self.workers.items() if each != name}
        workers[successor.name] = successor
        standbys = tuple(place_standbys(list(workers.values()), self.standby_roles, self.standbys))
        return replace(self, workers=workers, standbys=standbys), successor
