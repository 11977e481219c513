"""Flags of `baton serve` and `baton demo` about workers, and the resulting fleet."""

import argparse
from dataclasses import replace

from common.base.errors import ConfigError
from common.settings.config import Config, WorkerSection
from common.settings.limits import DAY_S
from common.settings.memory_sections import MemorySection
from common.settings.options import number
from common.wire.messages.worker import Role
from deploy.processes.launch_plan import STANDBYS
from deploy.processes.mps import DEFAULT_PREFILL_PERCENT, MODES, MpsOptions
from deploy.serve.command import Fleet

MAX_OF_A_ROLE = 256
"""Most workers of a role on a machine."""


def add_fleet(parser: argparse.ArgumentParser) -> None:
    """Add flags for number, place and upkeep of a system's workers."""
    parser.add_argument(
        "--prefill",
        type=number(int, 0, MAX_OF_A_ROLE),
        metavar="N",
        help=f"prefill workers (0 to {MAX_OF_A_ROLE}, default: 1); 0 with --kv-transport none, and only with it",
    )
    parser.add_argument(
        "--decode",
        type=number(int, 1, MAX_OF_A_ROLE),
        default=1,
        metavar="M",
        help=f"decode workers (1 to {MAX_OF_A_ROLE}, default: 1)",
    )
    _add_upkeep(parser)


def add_joining(parser: argparse.ArgumentParser) -> None:
    """Add flags for number, place and upkeep of workers of another host's router."""
    for role in ("prefill", "decode"):
        parser.add_argument(
            f"--{role}",
            type=number(int, 0, MAX_OF_A_ROLE),
            default=0,
            metavar="N",
            help=f"{role} workers (0 to {MAX_OF_A_ROLE}, default: 0)",
        )
    parser.add_argument(
        "--name",
        default="",
        help="ends the names of these workers, other than on every host (default: the host's name)",
    )
    _add_upkeep(parser)


def _add_upkeep(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device", dest="worker.device", metavar="DEVICE", help="auto, cpu, cuda or cuda:N (default: auto)"
    )
    parser.add_argument(
        "--gpus",
        default="",
        metavar="LIST",
        help="GPU indices, for example 0,1: prefill workers and then decode workers go round them (default: all)",
    )
    parser.add_argument(
        "--start-timeout-s",
        type=number(float, 1.0, DAY_S),
        default=1800.0,
        metavar="S",
        help=f"give up when not ready by then (1 to {DAY_S:.0f}, default: 1800)",
    )
    parser.add_argument(
        "--standby",
        choices=STANDBYS,
        default="none",
        help="one worker more of this kind on each device that has any: as ready as they are, and without requests "
        "until one of them dies or leaves, so that its streams do not wait for its restart. It costs what a process "
        "takes; weights and KV blocks it shares with them (default: none)",
    )
    parser.add_argument(
        "--fork-server",
        choices=("on", "off"),
        default="on",
        help="one process imports what workers need, and forks them: they share the memory of it, and one that died is "
        "back some seconds sooner; off has each worker import for itself (default: on)",
    )
    _add_mps(parser)


def _add_mps(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--mps",
        choices=MODES,
        default="auto",
        help="NVIDIA MPS where a prefill and a decode worker share a GPU: auto uses it if it is there, on insists on "
        "it, off starts none and caps nothing. A daemon of your own (CUDA_MPS_PIPE_DIRECTORY, or the default "
        "directory) is used as it is. A CUDA fault of one worker can take its neighbours under MPS down with it; "
        "they are started again (default: auto)",
    )
    parser.add_argument(
        "--mps-prefill-percent",
        type=number(int, 0, 100),
        default=DEFAULT_PREFILL_PERCENT,
        metavar="PERCENT",
        help="--prefill-sm-share of prefill workers on a shared GPU, so that decode steps stay short while a prompt "
        "runs; 0 is --mps off (0 to 100, default: %(default)s)",
    )


def fleet_of(args: argparse.Namespace, config: Config) -> Fleet:
    """Return the requested workers.

    Raises ConfigError for prefill workers without a KV transport, or the reverse unless some may join from other hosts;
    see also `_fleet`.
    """
    hands_off = config.kv.transport != "none"
    num_prefill = int(hands_off) if args.prefill is None else args.prefill
    if hands_off != (num_prefill > 0) and not (hands_off and config.net.advertise):
        raise ConfigError(
            f"--prefill {num_prefill} and kv.transport = {config.kv.transport}: kv.transport is none without "
            "prefill workers, and only then; set both, or leave --prefill out"
        )
    return _fleet(args, config, num_prefill)


def joining_fleet_of(args: argparse.Namespace, config: Config) -> Fleet:
    """Return the workers that join a router.

    Raises ConfigError without workers, without the router's place or this host's; see also `_fleet`.
    """
    if not args.prefill + args.decode:
        raise ConfigError("no workers: set --prefill, --decode, or both")
    if args.prefill and config.kv.transport == "none":
        raise ConfigError(f"--prefill {args.prefill} and kv.transport = none: nothing would be handed off")
    if not config.net.router_endpoint.startswith("tcp://"):
        raise ConfigError("net.router_endpoint: name the router to join, tcp://HOST:PORT, as it was told there")
    if not config.net.advertise:
        raise ConfigError("net.advertise: name this host as others reach it; without it no blocks travel")
    return _fleet(args, config, args.prefill)


def _fleet(args: argparse.Namespace, config: Config, num_prefill: int) -> Fleet:
    """Return the workers; raises ConfigError for standbys without workers, or for settings of one process."""
    _check_told_one(config)
    for role, num in ((Role.PREFILL, num_prefill), (Role.DECODE, args.decode)):
        if role in STANDBYS[args.standby] and not num:
            raise ConfigError(
                f"--standby {args.standby}: there are no {role.label} workers to stand by for; use "
                f"{role.other.label} or none"
            )
    mps = MpsOptions(args.mps, args.mps_prefill_percent)
    return Fleet(num_prefill, args.decode, args.gpus, args.start_timeout_s, mps, args.standby, args.fork_server == "on")


def _check_told_one(config: Config) -> None:
    """Raise ConfigError for settings meant for a single process."""
    usual = MemorySection()
    ours = replace(config.memory, id=usual.id, socket=usual.socket, device=usual.device, linger_s=usual.linger_s)
    if config.memory != ours:
        raise ConfigError(
            "memory.id, memory.socket, memory.device and memory.linger_s are for one memory server, and chosen here; "
            "leave them out, or start python -m common.memory yourself"
        )
    one = config.worker
    if one.standby:
        raise ConfigError(f"worker.standby = {one.standby}: that is for one worker; ask for --standby instead")
    if one != replace(one, id=WorkerSection().id, memory_socket=WorkerSection().memory_socket):
        raise ConfigError("worker.id and worker.memory_socket are for one worker, and chosen here; leave them out")
