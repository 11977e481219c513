"""`baton join`: workers and memory servers of this host for the router of another host.

Their names end with the host's name, because a router knows each name once. They are kept running as by `baton serve`.
A router that is away is awaited, and the end of it ends nothing here.
"""

import asyncio
import os
import sys
import time
from collections.abc import Collection
from dataclasses import replace
from functools import partial

from common.base.log import StartLog
from common.settings.config import Config
from deploy.autoscale.router_line import RouterLine
from deploy.processes.console import Console, background_writer
from deploy.processes.forks import ForkServer, modules_of
from deploy.processes.keeper import Deadlines, Keeper, Lifetime
from deploy.processes.launch_plan import host_processes, plan_workers
from deploy.processes.machine import num_cores, require_address_space
from deploy.processes.mps import open_mps
from deploy.processes.placement import Placement, spread_workers
from deploy.processes.runtime_dir import make_runtime_dir
from deploy.processes.supervisor import keep_until_stopped
from deploy.serve.command import Fleet, end_without, forking, held_bytes, notify_ready, place, with_mps

LOOK_S = 0.5
"""Seconds between two questions whether the router knows the workers."""


def joining(config: Config, fleet: Fleet, host: str) -> list[Placement]:
    """Return the places of the workers, with names that end with the host's name."""
    return [replace(each, name=f"{each.name}-{host}") for each in place(config, fleet, os.environ, spread_workers)]


async def join(config: Config, fleet: Fleet, host: str, start: StartLog) -> int:
    """Run until stopped; return the exit code. All output goes to stderr and never blocks."""
    form = config.log.format
    placements = joining(config, fleet, host)
    modules = modules_of(placements) if fleet.fork_server else ()
    model_bytes = held_bytes(config, placements)
    require_address_space(model_bytes + config.kv.cpu_pool_bytes)
    with background_writer(sys.stderr.fileno(), form) as log, make_runtime_dir() as runtime_dir:
        console = Console(log, log if sys.stderr.isatty() else None, form)
        plan = plan_workers(config, placements, runtime_dir, num_cores(), model_bytes, host=host)
        async with (
            forking(ForkServer(modules, os.environ, console)) as fork_server,
            open_mps(fleet.mps, placements, os.environ, runtime_dir, console) as mps,
        ):
            life = Lifetime()
            deadlines = Deadlines(fleet.start_timeout_s, config.router.drain_s, config.worker.drain_s)
            keeper = Keeper(life, deadlines, os.environ, console, fork_server)
            names = {each.name for each in placements if not each.standby}
            works = [
                partial(_announce, config, names, fleet.start_timeout_s, life, console, start),
                partial(end_without, runtime_dir, life),
            ]
            specs = [with_mps(spec, mps) for spec in host_processes(plan, placements)]
            return await keep_until_stopped(life, keeper, fork_server, specs, works, console)


async def _announce(
    config: Config, names: Collection[str], start_s: float, life: Lifetime, console: Console, start: StartLog
) -> None:
    """Say so once when the router gives requests to all workers; fail if it does not within `start_s`."""
    router, deadline_s = RouterLine(config.net, console), time.monotonic() + start_s
    missing: set[str] = set(names)
    while time.monotonic() < deadline_s:
        sample = await router.sample()
        missing = set(names) - {each.name for each in sample.serving} if sample else set(names)
        if not missing:
            life.ready.set()
            console.end_loading()
            start.ended("processes")
            console.say(start.text, fields=start.fields)
            console.show(f"ready: {', '.join(sorted(names))} at {config.net.router_endpoint}")
            notify_ready()
            return
        await asyncio.sleep(LOOK_S)
    life.fail(f"not ready after {start_s:g} s: {', '.join(sorted(missing))} unknown to the router, or not serving")
