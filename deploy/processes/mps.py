"""NVIDIA MPS for workers that share a GPU: use, choice of the daemon, and environment of the workers.

Without MPS the kernels of two processes never run together, and a decode step waits out the time slices of prefill. All
GPU workers become clients of a single daemon, because blocks move between any two workers. Only prefill workers beside
a decode worker are limited to a share of the GPU. An existing daemon is used and left alone. A new daemon lives in a
private directory and ends before `open_mps` returns.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from common.base.errors import ConfigError
from common.wire.messages.worker import Role
from deploy.processes.console import Console
from deploy.processes.exec_child import child_environment
from deploy.processes.placement import Placement

CONTROL = "nvidia-cuda-mps-control"
PIPE_DIRECTORY = "CUDA_MPS_PIPE_DIRECTORY"
LOG_DIRECTORY = "CUDA_MPS_LOG_DIRECTORY"
DEFAULT_PIPE_DIRECTORY = Path("/tmp/nvidia-mps")
GUARD = Path(__file__).with_name("mps_guard.py")
PROBE = Path(__file__).with_name("mps_probe.py")
DEFAULT_PREFILL_PERCENT = 80  # measured: lower, prompts wait; higher, decode steps do
MODES = ("auto", "on", "off")
COST = "decode steps share the GPU by time slices"
QUERY_DEADLINE_S = 5.0
START_DEADLINE_S = 90.0  # longer than the guard's deadlines together
STOP_DEADLINE_S = 30.0
KILL_DEADLINE_S = 5.0


@dataclass(frozen=True, slots=True)
class MpsOptions:
    """The user's choice: one of `MODES`, and the percentage of SMs for prompts beside decode steps.

    0 percent switches MPS off.
    """

    mode: str = "auto"
    prefill_percent: int = DEFAULT_PREFILL_PERCENT

    def __post_init__(self) -> None:
        if not 0 <= self.prefill_percent <= 100:
            raise ConfigError(f"--mps-prefill-percent {self.prefill_percent}: 1 to 100, or 0 for no MPS")


@dataclass(frozen=True, slots=True)
class Mps:
    """Result: additions to the environment of all processes on GPUs, flags by worker name, `text` for the operator."""

    environ: Mapping[str, str] = field(default_factory=dict)
    flags: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    text: str = ""  # empty if no GPU is shared


NO_MPS = Mps(text=f"no MPS ({COST})")


@contextlib.asynccontextmanager
async def open_mps(
    options: MpsOptions,
    placements: Sequence[Placement],
    environ: Mapping[str, str],
    runtime_dir: Path,
    console: Console,
) -> AsyncIterator[Mps]:
    """Provide MPS for these workers while the context is open, if needed and possible.

    Raises ConfigError if MPS is impossible and the user insists (`on`).
    """
    shared = shared_gpus(placements)
    if not shared:
        yield Mps()
    elif options.mode == "off" or options.prefill_percent == 0:
        console.say(f"MPS is switched off: {COST}")
        yield NO_MPS
    elif _is_provided(environ):
        console.say("using the MPS daemon that is already there")
        yield _in_use(options, placements, {})
    else:
        async with _own_daemon(shared, environ, runtime_dir, console) as (directories, problem):
            if problem and options.mode == "on":
                raise ConfigError(f"--mps on, but {problem}; --mps auto goes on without")
            if problem:
                console.say(f"no MPS: {problem}; {COST}", "W")
            yield NO_MPS if problem else _in_use(options, placements, directories)


@contextlib.asynccontextmanager
async def environs_under_mps(
    placements: Sequence[Placement], runtime_dir: Path, console: Console
) -> AsyncIterator[dict[str, dict[str, str]]]:
    """Yield the whole environment of each of these programs, by name; MPS is insisted on where a GPU is shared."""
    async with open_mps(MpsOptions("on"), placements, os.environ, runtime_dir, console) as mps:
        yield {each.name: {**os.environ, **mps.environ} for each in placements}


def shared_gpus(placements: Sequence[Placement]) -> list[int]:
    """Return the indices of GPUs with a prefill and a decode worker, ascending."""
    of_role = {
        role: {each.gpu.index for each in placements if each.gpu and each.role == role}
        for role in (Role.PREFILL, Role.DECODE)
    }
    return sorted(of_role[Role.PREFILL] & of_role[Role.DECODE])


def _in_use(options: MpsOptions, placements: Sequence[Placement], directories: Mapping[str, str]) -> Mps:
    shared, cap = shared_gpus(placements), ("--prefill-sm-share", str(options.prefill_percent))
    prefills = [each for each in placements if each.role == Role.PREFILL]
    return Mps(
        environ=directories,
        flags={each.name: cap for each in prefills if each.gpu and each.gpu.index in shared},
        text=f"MPS, prompts capped at {options.prefill_percent} % of the SMs while others are served",
    )


def _is_provided(environ: Mapping[str, str]) -> bool:
    """Tell whether another daemon exists: named by the user, or answering in the default directory."""
    if environ.get(PIPE_DIRECTORY):
        return True
    if not (DEFAULT_PIPE_DIRECTORY / "control").exists():
        return False
    try:
        asked = subprocess.run(
            [CONTROL],
            input=b"get_default_active_thread_percentage\n",
            capture_output=True,
            env=environ,
            timeout=QUERY_DEADLINE_S,
        )
    except FileNotFoundError:
        return True  # mounted from outside; this container has no control program
    except (OSError, subprocess.TimeoutExpired):
        return False
    return asked.returncode == 0


@contextlib.asynccontextmanager
async def _own_daemon(
    indices: Sequence[int], environ: Mapping[str, str], runtime_dir: Path, console: Console
) -> AsyncIterator[tuple[dict[str, str], str]]:
    """Run a daemon under `runtime_dir`; yield the directories for clients, and a problem if the daemon failed."""
    if shutil.which(CONTROL, path=environ.get("PATH")) is None:
        yield {}, f"{CONTROL} is not on PATH"
        return
    console.say("starting an MPS daemon")
    directories = {PIPE_DIRECTORY: str(runtime_dir / "mps"), LOG_DIRECTORY: str(runtime_dir / "mps-log")}
    for directory in directories.values():
        Path(directory).mkdir(mode=0o700)
    python = [sys.executable, "-I", "-S"]
    guard = await asyncio.create_subprocess_exec(
        *[*python, str(GUARD), *python, str(PROBE), *map(str, indices)],
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**child_environment(environ), **directories},
        start_new_session=True,
    )
    try:
        yield directories, await _problem(guard)
    finally:
        await _end(guard, console)


async def _problem(guard: asyncio.subprocess.Process) -> str:
    assert guard.stdout is not None
    try:
        said = await asyncio.wait_for(guard.stdout.readline(), START_DEADLINE_S)
    except TimeoutError:
        return f"{CONTROL} did not start within {START_DEADLINE_S:g} s"
    text = said.decode("utf-8", "replace").strip()
    return "" if text == "ready" else text or "its guard ended at once"


async def _end(guard: asyncio.subprocess.Process, console: Console) -> None:
    assert guard.stdin is not None
    guard.stdin.close()
    try:
        await asyncio.wait_for(guard.communicate(), STOP_DEADLINE_S)
    except TimeoutError:
        console.say(f"the MPS daemon did not end within {STOP_DEADLINE_S:g} s", "W")
        os.killpg(guard.pid, signal.SIGKILL)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(guard.communicate(), KILL_DEADLINE_S)
