"""From one configuration to the command lines of all processes."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from common.config import DECODE_SECTIONS, PREFILL_SECTIONS, ROUTER_SECTIONS, Config, NetSection
from common.errors import ConfigError
from common.options import to_flags
from common.wire.messages import Role
from deploy.placement import Placement, memory_fraction, threads_per_worker
from deploy.runtime_dir import MAX_SOCKET_PATH_BYTES

SOURCE_ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One process to keep running: its name in logs, the module and flags it is started with, and what
    its environment has beyond the supervisor's."""

    name: str
    module: str
    flags: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def argv(self) -> list[str]:
        """`-P` keeps the user's working directory from shadowing our packages."""
        return [sys.executable, "-P", "-m", self.module, *self.flags]


def plan_processes(
    config: Config, placements: Sequence[Placement], runtime_dir: Path, num_cores: int, weights_bytes: int
) -> list[ProcessSpec]:
    """The router first, then the workers. Endpoints that the user set stay as they are."""
    net = _router_net(config.net, runtime_dir)
    router = ProcessSpec("router", "router", tuple(to_flags(replace(config, net=net), ROUTER_SECTIONS)))
    specs = [router]
    for placement in placements:
        worker_config = replace(
            _worker_config(config, placement, placements, num_cores, weights_bytes),
            net=_worker_net(net, placement, runtime_dir),
        )
        sections = PREFILL_SECTIONS if placement.role == Role.PREFILL else DECODE_SECTIONS
        module = f"{placement.role.name.lower()}_worker"
        specs.append(ProcessSpec(placement.name, module, tuple(to_flags(worker_config, sections))))
    return specs


def _router_net(net: NetSection, runtime_dir: Path) -> NetSection:
    if net.router_endpoint != NetSection().router_endpoint:
        return net
    return replace(net, router_endpoint=_ipc(runtime_dir, "router"))


def _worker_net(net: NetSection, placement: Placement, runtime_dir: Path) -> NetSection:
    if placement.role == Role.PREFILL or net.handoff_endpoint != NetSection().handoff_endpoint:
        return net
    return replace(net, handoff_endpoint=_ipc(runtime_dir, placement.name))


def _worker_config(
    config: Config, mine: Placement, everyone: Sequence[Placement], num_cores: int, weights_bytes: int
) -> Config:
    """`config` with this worker's name, device and share of the machine."""
    if mine.gpu is None:
        num_threads = config.worker.num_threads or threads_per_worker(num_cores, len(everyone))
        return replace(config, worker=replace(config.worker, id=mine.name, device="cpu", num_threads=num_threads))
    share = memory_fraction(mine, everyone, config.kv.memory_fraction, weights_bytes)
    return replace(
        config,
        worker=replace(config.worker, id=mine.name, device=f"cuda:{mine.gpu.index}"),
        kv=replace(config.kv, memory_fraction=share),
    )


def _ipc(runtime_dir: Path, name: str) -> str:
    path = str(runtime_dir / f"{name}.sock")
    if len(path.encode()) > MAX_SOCKET_PATH_BYTES:
        raise ConfigError(f"socket path {path!r} is {len(path.encode())} bytes; at most {MAX_SOCKET_PATH_BYTES}")
    return f"ipc://{path}"
