"""What a process and those that it started have in memory, by the kernel's word.

RSS counts every page that a process maps. A page that several of them map, as those of a shared library, counts once
in each: the sum over processes is more than they occupy. PSS counts each page by how many have it, so its sum is what
would be free if they all ended, but for pages that others have, too.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
KIB = 1024


@dataclass(frozen=True, slots=True)
class Weight:
    """Of one process."""

    name: str  # of its module, without the package; of what a fork server forked, what `ps -e` shows
    rss_bytes: int
    pss_bytes: int


def family(pid: int) -> list[int]:
    """A process and all below it, parents first."""
    tasks = Path(f"/proc/{pid}/task")
    try:
        children = [int(child) for task in tasks.iterdir() for child in (task / "children").read_text().split()]
    except OSError:
        return []  # it has ended
    return [pid, *(each for child in children for each in family(child))]


def resident_bytes(pid: int) -> int:
    """RSS of one process, told in microseconds; 0 when it has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES
    except (OSError, IndexError):
        return 0


def weigh(pid: int) -> list[Weight]:
    """A process and all below it, each told in milliseconds, in which it maps nothing."""
    return [weight for each in family(pid) if (weight := _weight(each)) is not None]


def _weight(pid: int) -> Weight | None:
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        words = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").split()
        comm = Path(f"/proc/{pid}/comm").read_text().rstrip("\n")
    except OSError:
        return None  # it has ended
    module = words[words.index("-m") + 1] if "-m" in words else words[0]
    name = module.split(".")[-1] if comm.startswith("python") else comm
    found = {name: int(kib) * KIB for name, kib in re.findall(r"^(\w+): +(\d+) kB$", rollup, re.MULTILINE)}
    return Weight(name, found["Rss"], found["Pss"]) if "Pss" in found else None
