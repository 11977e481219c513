"""Results as rows of a CSV file; benchmarks/README.md documents the columns."""

import csv
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from deploy.bench.stats import Figure

ROOT = Path(__file__).resolve().parents[2]
COMMAND_DEADLINE_S = 10.0


@dataclass(frozen=True, slots=True)
class Row:
    """A figure of a run; `compared_with` names another system, and `compared_value` is its figure."""

    date: str
    commit: str
    hardware: str
    stack: str
    system: str
    model: str
    workload: str
    figure: str
    value: str
    unit: str
    compared_with: str
    compared_value: str
    command: str


def row_of(
    hardware: str, model: str, workload: str, figure: Figure, *,
    system: str = "baton", beside: tuple[str, float] | None = None,
) -> Row:  # fmt: skip
    """Make a row of a figure with day, commit and command of the run; `beside` is another system and its figure."""
    return Row(
        date=today(),
        commit=commit(),
        hardware=hardware,
        stack=stack(),
        system=system,
        model=model,
        workload=workload,
        figure=figure.name,
        value=f"{figure.value:.6g}",
        unit=figure.unit,
        compared_with=beside[0] if beside else "",
        compared_value=f"{beside[1]:.6g}" if beside else "",
        command=command_line(),
    )


def append_rows(path: Path, rows: Sequence[Row]) -> None:
    """Add rows, with a header if the file is new; raises ValueError if the file has another header."""
    header = [each.name for each in fields(Row)]
    is_new = not path.exists() or path.stat().st_size == 0
    if not is_new:
        with path.open(newline="") as existing:
            found = next(csv.reader(existing))
        if found != header:
            raise ValueError(f"{path} has the columns {','.join(found)}; expected {','.join(header)}")
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, header, lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


def read_rows(path: Path) -> list[Row]:
    """Return all rows in the file's order; raises ValueError if the file has other columns."""
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        expected = [each.name for each in fields(Row)]
        if reader.fieldnames != expected:
            raise ValueError(f"{path} has the columns {reader.fieldnames}; expected {','.join(expected)}")
        return [Row(**row) for row in reader]


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
    """Return the command to repeat the run from the repository root."""
    program, arguments = Path(sys.argv[0]).stem, sys.argv[1:]
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
