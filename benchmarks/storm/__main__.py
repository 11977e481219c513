"""Kills, drains, stops and replaces processes at random under a mixed load, and checks that no client notices.

    python -m benchmarks.storm --minutes 5 --seed 1 [--two-hosts]
    python -m benchmarks.storm --device cuda:0

First the idle system answers every request of the mix once. In the storm each answer must be the same, whatever dies
meanwhile. After the storm nothing may be left: no request, no block, no file, no memory. The last line is a summary.
The exit status is 0 if nothing was lost, wrong, crashed or left over. Flags after `--` go to the workers.

Workers and memory servers are hit. Some clients leave early, flood the system as a single user, send hostile grammars,
or do not read answers. `--two-hosts` puts every second worker of a role on another host, a network namespace. The cable
between both delays, loses, reorders, slows down, is cut, or carries one way only. That host vanishes; both stand still.
"""

import argparse
import asyncio
import contextlib
import os
import shutil
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.storm.blows import OF_NETWORK, ONE_HOST, TWO_HOSTS, Kind, plan
from benchmarks.storm.clients import Clients, Verdicts
from benchmarks.storm.fleet import Fleet
from benchmarks.storm.hosts import StormHosts, homes_of
from benchmarks.storm.leftovers import errors, excess, holdings
from benchmarks.storm.requests import Answer, Case, make_cases
from common.settings.config import NetSection
from deploy.bench.client import open_session
from tests.e2e.programs import forked
from tests.e2e.slow_system import SlowSystem
from tests.e2e.system import System
from tests.e2e.two_hosts import BACK, FRONT
from tests.support.hosts import Hosts, problem

FLAGS = ("--model-dtype", "float32", "--prefill-max-batch-tokens", "256", "--decode-max-num-seqs", "24")
"""Float32 for equal texts in any batch; small steps and batches, so prompts come in pieces."""
ROUTER_FLAGS = ("--router-max-attempts", "100", "--router-min-priority", "-1", "--router-worker-wait-s", "300")
"""Attempts are many because an unlucky request looks like a killer of workers; no request here is.

Some requests are urgent. All workers may be gone at once, and may start slowly on a slow machine.
"""
ANY_RATE = ("--kv-min-gb-per-s", "0")
"""Of paths between hosts, so that they are used in any weather."""
SETTLE_DEADLINE_S = 60.0
ROLES = ("prefill", "decode")
STANDBYS = ("none", *ROLES, "both")
FAULTS = ("lost", "wrong", "crashed", "left over")
IDLE_GAUGES = (
    "baton_requests_queued",
    "baton_queued_prompt_tokens",
    "baton_requests_running",
    "baton_worker_running",
    "baton_worker_waiting",
    "baton_worker_handoffs",
)


async def storm(args: argparse.Namespace) -> tuple[str, Verdicts]:
    """Run a storm; return the summary line and the verdicts."""
    verdicts, tag = Verdicts(), f"storm{os.getpid()}"
    workers = workers_of(args, tag)
    with contextlib.ExitStack() as stack:
        system = stack.enter_context(_system(args, workers, stack))
        try:
            system.start_router(0, *ROUTER_FLAGS)
            fleet = Fleet(system, workers, verdicts)
            for name in (*fleet.memories, *workers):
                fleet.start(name)
            await _undergo(system, fleet, workers, args, verdicts)
            replays = await _sum(system, "baton_replays_total")
            between = await _sum(system, "baton_handoff_seconds_count", "nixl tcp")
            if args.two_hosts and not between:
                verdicts.fault("lost", "nothing was handed to another host")
            await fleet.end_all()
            _complain(verdicts, errors(system))
        finally:
            if args.logs:
                shutil.copytree(system.directory.name, args.logs, ignore=_no_sockets, dirs_exist_ok=True)
    return _summary(args, verdicts, fleet, replays, between), verdicts


def _system(args: argparse.Namespace, workers: Iterable[str], stack: contextlib.ExitStack) -> System:
    """Return the system, on one host or two.

    Computing seems slow to prefill workers, so they restore and pull blocks.
    """
    flags = [*FLAGS, "--kv-pool-bytes", str(args.pool_mb << 20), *args.flags]
    memory_flags, net = ("--memory-host-tier-bytes", str(args.host_tier_mb << 20)), NetSection()
    if args.two_hosts:
        hosts = stack.enter_context(Hosts(FRONT, BACK, wired=BACK))
        system = StormHosts(hosts, args.model, *flags, *ANY_RATE, memory_flags=memory_flags)
        system.homes = homes_of(workers)
        return system
    return SlowSystem(
        args.model,
        *flags,
        device=args.device,
        silence_s=net.worker_timeout_s,
        heartbeat_s=net.heartbeat_s,
        launch=forked,
        memory_flags=memory_flags,
    )


def workers_of(args: argparse.Namespace, tag: str) -> dict[str, int]:
    """Return names of all workers, each with the number of workers for which the worker stands by."""
    workers: dict[str, int] = {}
    for role in ROLES:
        num_workers = getattr(args, role)
        workers |= {f"{role}-{tag}-{n}": 0 for n in range(num_workers)}
        if args.standby in (role, "both"):
            workers[f"{role}-{tag}-standby"] = num_workers
    return workers


async def _undergo(
    system: System, fleet: Fleet, workers: Mapping[str, int], args: argparse.Namespace, verdicts: Verdicts
) -> None:
    """Check the system at rest, storm, and check again."""
    prefills, decodes = ([name for name in workers if name.startswith(role)] for role in ROLES)
    await _all_in_place(system, workers)
    async with open_session() as session:
        answers = await _answers_at_rest(session, system, args, verdicts)
    await _at_rest(system, workers)
    before = await asyncio.to_thread(holdings, system)
    duration_s = args.minutes * 60
    kinds = args.kinds or (TWO_HOSTS if args.two_hosts else ONE_HOST)
    blows = plan(args.seed, duration_s, args.interval_s, prefills, decodes, fleet.memories, kinds)
    until_s = time.monotonic() + duration_s
    async with open_session() as session:
        clients = Clients(session, system.url, args.deadline_s, answers, verdicts)
        asking = [clients.keep_asking(args.seed * 1000 + n, until_s) for n in range(args.clients)]
        await asyncio.gather(fleet.weather(blows), clients.keep_looking(until_s, args.live_deadline_s), *asking)
    try:
        await _at_rest(system, workers)
    except AssertionError as error:
        _complain(verdicts, [f"not at rest again: {str(error)[:200]} {system.health()}"])
    if verdicts.longest_gap_s > args.gap_deadline_s:
        verdicts.fault("lost", f"a stream stood still for {verdicts.longest_gap_s:.1f} s")
    _complain(verdicts, excess(before, await asyncio.to_thread(holdings, system)))


async def _answers_at_rest(
    session: aiohttp.ClientSession, system: System, args: argparse.Namespace, verdicts: Verdicts
) -> dict[Case, Answer]:
    """Return each case's answer from an otherwise idle system."""
    async with asyncio.timeout(args.deadline_s), session.get(f"{system.url}/v1/models") as response:
        max_model_len = (await response.json())["data"][0]["max_model_len"]
    clients = Clients(session, system.url, args.deadline_s, {}, verdicts)
    async with asyncio.timeout(10 * args.deadline_s):
        return {case: await clients.ask(case, stream=False) for case in make_cases(args.seed, max_model_len)}


async def _all_in_place(system: System, workers: Mapping[str, int]) -> None:
    """Wait until all workers have joined and met, and standbys are in reserve; raises AssertionError."""
    prefill, decode = (sum(name.startswith(role) for name in workers) for role in ROLES)
    standbys = {name for name, num_others in workers.items() if num_others}
    await asyncio.to_thread(system.wait_ready, prefill, decode)
    await asyncio.to_thread(system.until, lambda: system.in_reserve() == standbys, SETTLE_DEADLINE_S)


async def _at_rest(system: System, workers: Mapping[str, int]) -> None:
    """Wait until all workers are in place without any requests; raises AssertionError."""
    await _all_in_place(system, workers)
    await asyncio.to_thread(system.until, system.all_blocks_free, SETTLE_DEADLINE_S)
    deadline_s = time.monotonic() + SETTLE_DEADLINE_S
    while busy := {name: value for name in IDLE_GAUGES if (value := await _sum(system, name))}:
        assert time.monotonic() < deadline_s, f"still busy: {busy}"
        await asyncio.sleep(0.1)
    health = system.health()
    assert health["status"] == "ok", health


async def _sum(system: System, name: str, transport: str = "") -> float:
    """Return the sum of a metric's samples, of all transports or of one."""
    async with open_session() as session, session.get(f"{system.url}/metrics") as response:
        families = text_string_to_metric_families(await response.text())
    samples = [sample for family in families for sample in family.samples if sample.name == name]
    return sum(each.value for each in samples if transport in ("", each.labels.get("transport")))


def _complain(verdicts: Verdicts, leftovers: Iterable[str]) -> None:
    for what in leftovers:
        verdicts.fault("left over", what)


def _no_sockets(directory: str, names: list[str]) -> set[str]:
    return {name for name in names if (Path(directory) / name).is_socket()}


def _summary(args: argparse.Namespace, verdicts: Verdicts, fleet: Fleet, replays: float, between: float) -> str:
    num, hits = verdicts.num, fleet.num
    standby = "" if args.standby == "none" else f", standby {args.standby}"
    where = "two hosts" if args.two_hosts else args.device
    network = ", ".join(f"{hits[kind]} {kind}" for kind in OF_NETWORK) if args.two_hosts else ""
    network += f"; {between:.0f} handoffs between hosts; " if args.two_hosts else ""
    met = fleet.during(verdicts.longest_gap_end_s, verdicts.longest_gap_s)
    clients = ", ".join(f"{num[kind]} {kind}" for kind in ("answered", "left", "unread", "refused"))
    return (
        f"{args.prefill}P{args.decode}D{standby} on {where}, {args.minutes:g} min, seed {args.seed}: "
        f"{clients}, {replays:.0f} replays; "
        f"{hits[Kind.KILL]} kills, {hits[Kind.DRAIN]} drains, {hits[Kind.STOP]} stops, "
        f"{hits[Kind.REPLACE] + hits[Kind.OUST]} replaced, "
        f"memory {hits[Kind.FREEZE]} times frozen, {hits[Kind.FORGET]} killed; {network}"
        f"{', '.join(f'{num[kind]} {kind}' for kind in FAULTS)}; slowest {verdicts.slowest_s:.1f} s, "
        f"longest gap {verdicts.longest_gap_s:.1f} s ({met or 'no blow'}), "
        f"first token after {verdicts.slowest_first_s:.1f} s, /live {verdicts.slowest_live_s * 1e3:.0f} ms"
    )


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.storm", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--model", type=Path, default=Path("deploy/demo_model"), help="directory (default: %(default)s)"
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda:N (default: %(default)s)")
    parser.add_argument("--prefill", type=int, default=2, help="prefill workers (default: %(default)s)")
    parser.add_argument("--decode", type=int, default=2, help="decode workers (default: %(default)s)")
    parser.add_argument(
        "--standby", choices=STANDBYS, default="none", help="of these one more, which stands by (default: %(default)s)"
    )
    parser.add_argument("--two-hosts", action="store_true", help="with faults of the network between; needs root")
    parser.add_argument(
        "--kinds", nargs="+", type=Kind, choices=list(Kind), metavar="KIND", help="of blows (default: all)"
    )
    parser.add_argument("--minutes", type=float, default=5.0, help="how long it lasts (default: %(default)g)")
    parser.add_argument("--seed", type=int, default=1, help="of requests and blows (default: %(default)s)")
    parser.add_argument(
        "--interval-s", type=float, default=4.0, help="between two blows, on average (default: %(default)g)"
    )
    parser.add_argument("--clients", type=int, default=8, help="that ask at once (default: %(default)s)")
    parser.add_argument("--pool-mb", type=int, default=16, help="KV pool of a worker (default: %(default)s)")
    parser.add_argument("--host-tier-mb", type=int, default=0, help="of a memory server (default: %(default)s)")
    parser.add_argument("--deadline-s", type=float, default=180.0, help="for a request (default: %(default)g)")
    parser.add_argument("--live-deadline-s", type=float, default=10.0, help="for /live (default: %(default)g)")
    parser.add_argument(
        "--gap-deadline-s", type=float, default=60.0,
        help="between tokens; needs more where all decode workers may be cut off for a minute (default: %(default)g)",
    )  # fmt: skip
    parser.add_argument("--logs", type=Path, help="directory in which the logs of all processes are kept")
    parser.add_argument("flags", nargs="*", help="for the workers, after --, in pairs")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    """Run a storm; return 0 if nothing went wrong, else 1."""
    args = parse_args(argv)
    if not args.two_hosts and OF_NETWORK.keys() & {*(args.kinds or ())}:
        print("faults of the network need --two-hosts", file=sys.stderr)
        return 2
    if args.two_hosts and (why := problem()):
        print(f"no two hosts here: {why}", file=sys.stderr)
        return 2
    summary, verdicts = asyncio.run(storm(args))
    for fault in verdicts.faults:
        print(fault)
    print(summary)
    return int(any(verdicts.num[kind] for kind in FAULTS))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
