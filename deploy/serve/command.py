"""`baton serve`: from a model's name to running processes."""

import contextlib
import json
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from common.base.json_file import JsonObject
from common.base.log import StartLog
from common.models.forms import Target, forms_on
from common.settings.config import Config
from deploy.autoscale.autoscaler import SAMPLE_S, SAMPLES_A_WINDOW, Autoscaler, Plan
from deploy.autoscale.judge import Judge
from deploy.autoscale.options import AutoscaleOptions, little_to_change
from deploy.autoscale.proposal import Machine
from deploy.autoscale.router_line import RouterLine
from deploy.operate.health import local_url, transports
from deploy.processes.console import Console, background_writer
from deploy.processes.early import Early
from deploy.processes.forks import ForkServer, modules_of
from deploy.processes.keeper import Deadlines, Lifetime
from deploy.processes.launch_plan import STANDBYS, Kind, ProcessSpec, WorkerPlan, all_processes, plan_workers
from deploy.processes.machine import detect_gpus, num_cores, require_address_space
from deploy.processes.mps import Mps, MpsOptions, open_mps
from deploy.processes.placement import Placement, Staff, choose_gpus, in_either_role, place_standbys, place_workers
from deploy.processes.runtime_dir import make_runtime_dir, until_lost
from deploy.processes.supervisor import Supervisor
from deploy.serve.model_source import find_model, served_name, weights_bytes


@dataclass(frozen=True, slots=True)
class Fleet:
    """Number of workers of each kind, GPUs (comma-separated indices; empty for all), and sharing of GPUs."""

    num_prefill: int
    num_decode: int
    gpus: str
    start_timeout_s: float
    mps: MpsOptions = field(default_factory=MpsOptions)
    standby: str = "none"  # a key of STANDBYS
    fork_server: bool = True
    autoscale: AutoscaleOptions | None = None


def with_model(config: Config, name: str) -> Config:
    """Return `config` with the model found on disk or downloaded; a name of the Hub is also the name for clients."""
    path = find_model(name)
    called = config.model.name or served_name(path, name)
    return replace(config, model=replace(config.model, path=str(path), name=called))


def with_port(config: Config) -> Config:
    """Return `config` with port 0 replaced by a port that was free a moment ago."""
    if config.router.port:
        return config
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return replace(config, router=replace(config.router, port=probe.getsockname()[1]))


def place(
    config: Config, fleet: Fleet, environ: Mapping[str, str], spread: Callable[..., list[Placement]] = place_workers
) -> list[Placement]:
    """Return the places of a fleet's workers on this machine, spread over its devices as `place_workers` does."""
    device = config.worker.device
    detected = [] if device == "cpu" else detect_gpus(environ)
    workers = spread(fleet.num_prefill, fleet.num_decode, choose_gpus(device, fleet.gpus, detected))
    return workers + place_standbys(workers, STANDBYS[fleet.standby])


def held_bytes(config: Config, placements: Sequence[Placement]) -> int:
    """Return about the size of a copy of the weights in memory, on the device of these where it is largest."""
    capabilities = {None if each.gpu is None else each.gpu.capability for each in placements}
    forms = {forms_on(Target.of(config, each), config.model.quantization) for each in capabilities}
    return max(weights_bytes(Path(config.model.path), each, config.model.head) for each in forms)


@contextlib.asynccontextmanager
async def prepared(
    config: Config, fleet: Fleet, console: Console, early: Early | None = None
) -> AsyncIterator[tuple[Supervisor, Mps]]:
    """Provide a supervisor, with nothing started yet, and the state of MPS; `early` is a fork server begun already."""
    placements = place(config, fleet, os.environ)
    possible = in_either_role(placements) if fleet.autoscale else placements
    modules = modules_of(placements) if fleet.fork_server else ()
    with make_runtime_dir() as runtime_dir:
        model_bytes = held_bytes(config, possible)
        require_address_space(model_bytes + config.kv.cpu_pool_bytes)
        plan = plan_workers(config, placements, runtime_dir, num_cores(), model_bytes, possible)
        async with (
            forking(ForkServer(modules, os.environ, console, early)) as fork_server,  # imports while MPS starts
            open_mps(fleet.mps, possible, os.environ, runtime_dir, console) as mps,
        ):
            supervisor = Supervisor(
                [with_mps(spec, mps) for spec in all_processes(plan, placements)],
                local_url(config.router.host, config.router.port),
                Deadlines(fleet.start_timeout_s, config.router.drain_s, config.worker.drain_s),
                os.environ,
                console,
                fork_server,
            )
            supervisor.add_companion(partial(end_without, runtime_dir, supervisor))
            if fleet.autoscale:
                _autoscale(supervisor, placements, plan, mps, fleet.autoscale, console)
            yield supervisor, mps


@contextlib.asynccontextmanager
async def forking(fork_server: ForkServer) -> AsyncIterator[ForkServer]:
    """Have a fork server run for as long as the context."""
    try:
        await fork_server.begin()
        yield fork_server
    finally:
        await fork_server.end()


async def end_without(runtime_dir: Path, system: Supervisor | Lifetime) -> None:
    """End in order when the sockets are gone, because no worker could start again; connections last until then."""
    await system.ready.wait()
    await until_lost(runtime_dir)
    system.fail(f"{runtime_dir} was removed, so that workers could not reach one another; start again, and keep it")


def _autoscale(
    supervisor: Supervisor,
    placements: Sequence[Placement],
    workers: WorkerPlan,
    mps: Mps,
    options: AutoscaleOptions,
    console: Console,
) -> None:
    """Add role changes to the supervisor.

    If the user sets the size of pools, two workers at once may not fit, so changes do not overlap.
    """
    if reason := little_to_change(placements):
        console.say(reason, "W")
    is_cpu = all(each.gpu is None for each in placements)
    plan = Plan(
        spec_of=lambda placement: with_mps(workers.spec(placement), mps),
        overlap=is_cpu or not workers.config.kv.pool_bytes,
        sample_s=min(SAMPLE_S, options.pace.window_s / SAMPLES_A_WINDOW),
    )
    judge = Judge(options.pace, Machine(is_cpu, options.longest_step_ms / 1e3))
    router = RouterLine(workers.config.net, console)
    supervisor.add_companion(Autoscaler(supervisor.keeper, router, Staff.of(placements), plan, judge, console).run)


def with_mps(spec: ProcessSpec, mps: Mps) -> ProcessSpec:
    """Add environment and flags of `mps` to a process; the user's flags come last and win."""
    flags = (*mps.flags.get(spec.name, ()), *spec.flags)
    return replace(spec, flags=flags, env={} if spec.kind is Kind.ROUTER else mps.environ)


async def serve(config: Config, fleet: Fleet, start: StartLog, early: Early | None = None) -> int:
    """Run until stopped; return the exit code. All output goes to stderr and never blocks.

    Args:
        early: a fork server begun already.
    """
    form = config.log.format
    with background_writer(sys.stderr.fileno(), form) as log:
        console = Console(log, log if sys.stderr.isatty() else None, form)
        async with prepared(config, fleet, console, early) as (supervisor, mps):
            start.ended("plan and MPS")
            return await supervisor.run(lambda health: _announce(config, health, mps, console, start))


def _announce(config: Config, health: JsonObject, mps: Mps, console: Console, start: StartLog) -> None:
    start.ended("processes")
    console.say(start.text, fields=start.fields)
    console.show(ready_text(config, health, mps))
    notify_ready()


def ready_text(config: Config, health: JsonObject, mps: Mps) -> str:
    """Return the readiness message: state, a command to try, status page, and the way to end, a line each."""
    url = local_url(config.router.host, config.router.port)
    name = config.model.served_name
    workers = health["workers"].items()
    roles = ["standby" if each["standby"] is not None else role for role, members in workers for each in members]
    kinds = ("prefill", "decode", *(["standby"] if "standby" in roles else []))
    fleet = " + ".join(f"{roles.count(kind)} {kind}" for kind in kinds)
    sharing = f"  {mps.text}" if mps.text else ""
    body = json.dumps({"model": name, "prompt": "Once upon a time", "max_tokens": 64})
    key = " -H 'authorization: Bearer KEY'" if config.router.api_key_file else ""
    way = f"KV over {transports(health)}" if health["kv_paths"] else "prompts in decode workers"
    degraded = [f"\n  {health['status']}: {problem}" for problem in health["problems"]]
    return (
        f"ready: {url}  model {name}  {fleet}  {way}{sharing}{''.join(degraded)}\n"
        f"  curl {url}/v1/completions -H 'content-type: application/json'{key} -d '{body}'\n"
        f"  status page: {url}/  API: {url}/docs  Ctrl-C finishes what runs, and ends"
    )


def notify_ready(environ: Mapping[str, str] = os.environ) -> None:
    """Send READY=1 to `NOTIFY_SOCKET`; do nothing without the variable or a listener."""
    path = environ.get("NOTIFY_SOCKET", "")
    if not path:
        return
    address = f"\0{path[1:]}" if path.startswith("@") else path
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager, contextlib.suppress(OSError):
        manager.sendto(b"READY=1", address)
