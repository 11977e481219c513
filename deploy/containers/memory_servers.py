"""Run the memory servers of a container: a server for each visible GPU, or for the CPU.

    python -P -m deploy.containers.memory_servers DIRECTORY [option ...]

The sockets are in DIRECTORY, where a worker finds the socket of its device. An ended server is started again while the
others go on. SIGTERM ends all servers.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Sequence

from common.base.errors import ConfigError
from common.settings import options
from common.settings.config import MEMORY_SECTIONS, Config
from deploy.processes.child import Backoff, Child, describe_exit
from deploy.processes.console import Console, background_writer
from deploy.processes.keeper import CONFIG_EXIT_CODE
from deploy.processes.launch_plan import Kind, ProcessSpec
from deploy.processes.machine import detect_gpus
from deploy.processes.placement import Gpu


def specs(directory: str, gpus: Sequence[Gpu], flags: Sequence[str]) -> list[ProcessSpec]:
    """Return the servers' processes, named as by `baton serve`."""
    devices = {f"memory-{gpu.index}": f"cuda:{gpu.index}" for gpu in gpus} or {"memory": "cpu"}
    at = ("--memory-socket", f"{directory.rstrip('/')}/")
    return [
        ProcessSpec(name, "common.memory", ("--memory-id", name, "--memory-device", device, *at, *flags), Kind.MEMORY)
        for name, device in devices.items()
    ]


async def keep(spec: ProcessSpec, console: Console, stopping: asyncio.Event) -> int:
    """Keep a server running until `stopping`; return its exit status for wrong settings, else 0."""
    backoff = Backoff()
    while not stopping.is_set():
        child = await Child.start(spec, os.environ, console)
        ended, stopped = asyncio.ensure_future(child.ended()), asyncio.ensure_future(stopping.wait())
        await asyncio.wait({ended, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if not ended.done():
            child.signal(signal.SIGTERM)
        code = await ended
        stopped.cancel()
        if code == CONFIG_EXIT_CODE:
            stopping.set()
            return code
        if not stopping.is_set():
            delay_s = backoff.after(child.lived_s)
            console.say(f"{spec.name} ended with {describe_exit(code)}; again in {delay_s:g} s", "W")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stopping.wait(), delay_s)
    return 0


async def run(wanted: Sequence[ProcessSpec], form: str = "text") -> int:
    """Run until a signal; return the exit status. `form` is the log format of this process."""
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    with background_writer(sys.stderr.fileno(), form) as log:
        console = Console(log, None, form)
        return max(await asyncio.gather(*(keep(spec, console, stopping) for spec in wanted)))


def main(argv: list[str]) -> int:
    directory, *flags = argv
    return asyncio.run(run(specs(directory, detect_gpus(os.environ), flags), _form(flags)))


def _form(flags: Sequence[str]) -> str:
    """Return the log format of the servers; the servers themselves report wrong settings."""
    try:
        return options.parse(Config, MEMORY_SECTIONS, "deploy.containers.memory_servers", "", flags).log.format
    except ConfigError:
        return "text"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
