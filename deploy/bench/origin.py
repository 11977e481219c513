"""Origin of a run: day, commit, hardware, versions, command."""

import platform
import shlex
import subprocess
import sys
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMMAND_DEADLINE_S = 10.0
STARTS = ("--started-by", "--vs-started-by")
"""Options that tell how servers were started."""


def today() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d")


def commit() -> str:
    """Return the short commit of the source, with `-dirty` for uncommitted changes; `unknown` outside a repository."""
    return _output(["git", "-C", str(ROOT), "describe", "--always", "--dirty"]) or "unknown"


def hardware() -> str:
    """Return the GPUs' name, or the CPU's without a GPU."""
    names = _output(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]).splitlines()
    if names:
        return f"{len(names)} x {names[0]}" if len(names) > 1 else names[0]
    return _cpu_name()


def stack() -> str:
    """Return versions of the libraries that decide the kernels' speed, as installed here; `system` may use others."""
    versions = []
    for name in ("torch", "triton"):
        with suppress(PackageNotFoundError):
            versions.append(f"{name} {version(name).partition('+')[0]}")
    return ", ".join(versions)


def command_line() -> str:
    """Return the command to repeat the run from the repository root, without `STARTS`."""
    path, arguments, given = Path(sys.argv[0]), [], iter(sys.argv[1:])
    program = path.parent.name if path.stem == "__main__" else path.stem  # a package's, or a module's
    for argument in given:
        if argument in STARTS:
            next(given, None)
        elif argument.partition("=")[0] not in STARTS:
            arguments.append(argument)
    if arguments[:1] == ["bench"]:  # `baton bench`
        program, arguments = "serve", arguments[1:]
    return shlex.join(["python", "-m", f"benchmarks.{program}", *arguments])


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.machine()


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=COMMAND_DEADLINE_S)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
