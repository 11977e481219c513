"""Files and memory held by processes, and the excess after a storm."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.system import System

MORE_FILES = 16
MORE_BYTES = 96 << 20
"""Tolerated growth of a process over its kind at rest: caches fill, allocators round up."""


@dataclass(frozen=True, slots=True)
class Holding:
    """File descriptors and private memory of a process and its children."""

    num_files: int
    private_bytes: int


def holdings(system: System) -> dict[str, Holding]:
    """Return holdings by name of the process."""
    return {name: _holding(process.pid) for name, process in system.processes.items()}


def excess(before: dict[str, Holding], after: dict[str, Holding]) -> list[str]:
    """Describe holdings after a storm above the largest of an equal kind before, plus the tolerated growth."""
    found = []
    for name, now in after.items():
        kind = [holding for other, holding in before.items() if other.split("-")[0] == name.split("-")[0]]
        most_files = max(holding.num_files for holding in kind) + MORE_FILES
        most_bytes = max(holding.private_bytes for holding in kind) + MORE_BYTES
        if now.num_files > most_files:
            found.append(f"{name} has {now.num_files} files open, more than {most_files}")
        if now.private_bytes > most_bytes:
            found.append(f"{name} holds {now.private_bytes >> 20} MB, more than {most_bytes >> 20}")
    return found


def errors(system: System) -> list[str]:
    """Return log lines that are errors, except of a worker whose id was taken."""
    found = []
    for path in sorted(Path(system.directory.name).glob("*.log")):
        for line in path.read_text(errors="replace").splitlines():
            if re.search(r"^\S+ [EC] \[|^Traceback|Assertion failed", line) and "started again as epoch" not in line:
                found.append(f"{path.name}: {line[:300]}")
    return found


def _holding(pid: int) -> Holding:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    num_files = len(os.listdir(f"/proc/{pid}/fd"))
    return Holding(num_files, sum(map(_private_bytes, [str(pid), *children])))


def _private_bytes(pid: str) -> int:
    """Return the anonymous resident memory of a process."""
    match = re.search(r"^RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return int(match[1]) * 1024 if match else 0
