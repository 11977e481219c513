"""Command lines of all processes, from a single configuration."""

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from pathlib import Path

from common.base.errors import ConfigError
from common.settings.config import MEMORY_SECTIONS, ROUTER_SECTIONS, WORKER_SECTIONS, Config, NetSection
from common.settings.options import to_flags
from common.wire.messages.worker import Role
from deploy.processes.placement import Gpu, Placement, memory_fraction, threads_per_worker
from deploy.processes.runtime_dir import MAX_SOCKET_PATH_BYTES

STANDBYS = {"none": (), "prefill": (Role.PREFILL,), "decode": (Role.DECODE,), "both": (Role.PREFILL, Role.DECODE)}
"""Roles with standbys, by value of `--standby`."""
SOURCE_ROOT = Path(__file__).resolve().parents[2]


class Kind(IntEnum):
    """Kind of a process, in the order of ending: each ends before the processes needed by it."""

    ROUTER = 1
    WORKER = 2
    MEMORY = 3


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """A process to keep running: name in logs, module, flags, and additions to the supervisor's environment."""

    name: str
    module: str
    flags: tuple[str, ...]
    kind: Kind
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def argv(self) -> list[str]:
        """Command line; `-P` keeps the user's working directory from shadowing our packages."""
        return [sys.executable, "-P", "-m", self.module, *self.flags]


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """Settings of a system's workers, wherever they run; see `plan_workers`."""

    config: Config  # of all workers
    runtime_dir: Path
    num_threads: int  # per worker on a CPU
    weights_bytes: int
    sockets: Mapping[Gpu | None, str]  # by GPU, of memory servers
    sharers: Mapping[Gpu | None, Counter[Role]]  # by GPU, workers for which the pool leaves room
    host: str = ""  # ends the memory servers' names, if the router has workers of several hosts

    def spec(self, placement: Placement) -> ProcessSpec:
        """Return the process of a worker."""
        config = replace(self._config(placement), net=_worker_net(self.config.net, placement, self.runtime_dir))
        module = f"{placement.role.label}_worker"
        return ProcessSpec(placement.name, module, tuple(to_flags(config, WORKER_SECTIONS)), Kind.WORKER)

    def _config(self, mine: Placement) -> Config:
        """Return `config` with the worker's name, device and share of the machine."""
        config, socket = self.config, self.sockets[mine.gpu]
        section = replace(config.worker, id=mine.name, memory_socket=socket, device=mine.device, standby=mine.standby)
        if mine.gpu is None:
            return replace(config, worker=replace(section, num_threads=self.num_threads))
        share = memory_fraction(mine.gpu, config.kv.memory_fraction, self.weights_bytes)
        sharers = self.sharers[mine.gpu]
        kv = replace(
            config.kv,
            memory_fraction=share,
            prefill_sharers=sharers[Role.PREFILL],
            decode_sharers=sharers[Role.DECODE],
        )
        return replace(config, worker=section, kv=kv)


def plan_workers(
    config: Config,
    placements: Sequence[Placement],
    runtime_dir: Path,
    num_cores: int,
    weights_bytes: int,
    possible: Sequence[Placement] = (),
    host: str = "",
) -> WorkerPlan:
    """Plan workers of these placements, and others on their devices; a standby takes no cores from the others.

    Args:
        possible: workers for which pools of KV blocks leave room; empty for `placements`.
        host: name of this host among several of a router; empty for a router here.
    """
    num_busy = sum(not each.standby for each in placements)
    sharers: dict[Gpu | None, Counter[Role]] = {}
    for each in possible or placements:
        sharers.setdefault(each.gpu, Counter())[each.role] += 1
    return WorkerPlan(
        config=replace(config, net=router_net(config.net, runtime_dir)),
        runtime_dir=runtime_dir,
        num_threads=config.worker.num_threads or threads_per_worker(num_cores, num_busy),
        weights_bytes=weights_bytes,
        sockets=_memory_sockets(placements, runtime_dir),
        sharers=sharers,
        host=host,
    )


def all_processes(plan: WorkerPlan, placements: Sequence[Placement]) -> list[ProcessSpec]:
    """Return the router first, then memory servers, then workers. User-defined endpoints stay."""
    router = ProcessSpec("router", "router", tuple(to_flags(plan.config, ROUTER_SECTIONS)), Kind.ROUTER)
    return [router, *host_processes(plan, placements)]


def host_processes(plan: WorkerPlan, placements: Sequence[Placement]) -> list[ProcessSpec]:
    """Return memory servers, then workers."""
    config = plan.config
    tier = config.memory.host_tier_fraction / len(plan.sockets)
    served = replace(config, memory=replace(config.memory, host_tier_fraction=tier))
    servers = [_memory_server(served, *each, plan.host) for each in plan.sockets.items()]
    return [*servers, *map(plan.spec, placements)]


def _memory_sockets(placements: Sequence[Placement], runtime_dir: Path) -> dict[Gpu | None, str]:
    """Return a socket path for each GPU, or for the host."""
    gpus = dict.fromkeys(each.gpu for each in placements)
    return {gpu: _socket(runtime_dir, _memory_name(gpu)) for gpu in gpus}


def _memory_name(gpu: Gpu | None) -> str:
    return "memory" if gpu is None else f"memory-{gpu.index}"


def _memory_server(config: Config, gpu: Gpu | None, path: str, host: str) -> ProcessSpec:
    device = "cpu" if gpu is None else f"cuda:{gpu.index}"
    name = f"{_memory_name(gpu)}-{host}" if host else _memory_name(gpu)
    section = replace(config.memory, id=name, socket=path, device=device)
    flags = to_flags(replace(config, memory=section), MEMORY_SECTIONS)
    return ProcessSpec(name, "common.memory", tuple(flags), Kind.MEMORY)


def router_net(net: NetSection, runtime_dir: Path) -> NetSection:
    """Return the router's endpoint: the user's, or a socket in `runtime_dir`."""
    if net.router_endpoint != NetSection().router_endpoint:
        return net
    return replace(net, router_endpoint=_ipc(runtime_dir, "router"))


def _worker_net(net: NetSection, placement: Placement, runtime_dir: Path) -> NetSection:
    if placement.role == Role.PREFILL or net.advertise or net.handoff_endpoint != NetSection().handoff_endpoint:
        return net
    return replace(net, handoff_endpoint=_ipc(runtime_dir, placement.name))


def _ipc(runtime_dir: Path, name: str) -> str:
    return f"ipc://{_socket(runtime_dir, name)}"


def _socket(runtime_dir: Path, name: str) -> str:
    path = str(runtime_dir / f"{name}.sock")
    if len(path.encode()) > MAX_SOCKET_PATH_BYTES:
        raise ConfigError(f"socket path {path!r} is {len(path.encode())} bytes; at most {MAX_SOCKET_PATH_BYTES}")
    return path
