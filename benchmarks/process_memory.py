"""Memory of a process and its descendants, by the kernel's counters.

RSS counts every page mapped by a process. A page of a shared library counts once for each process, so the sum of RSS
exceeds the memory in use. PSS divides each page by the number of its processes. So the sum of PSS is the memory freed
by ending all processes, except for pages shared with others.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
KIB = 1024


@dataclass(frozen=True, slots=True)
class Weight:
    """Name and memory of a process."""

    name: str  # module without its package; for a fork server's children, the name in `ps -e`
    rss_bytes: int
    pss_bytes: int


def family(pid: int) -> list[int]:
    """Return the process ids of a process and all descendants, parents first."""
    tasks = Path(f"/proc/{pid}/task")
    try:
        children = [int(child) for task in tasks.iterdir() for child in (task / "children").read_text().split()]
    except OSError:
        return []  # the process has ended
    return [pid, *(each for child in children for each in family(child))]


def resident_bytes(pid: int) -> int:
    """Return the RSS of a process, within microseconds; 0 after its end."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES
    except (OSError, IndexError):
        return 0


def weigh(pid: int) -> list[Weight]:
    """Weigh a process and all descendants; takes milliseconds each, during which a process cannot map memory."""
    return [weight for each in family(pid) if (weight := _weight(each)) is not None]


def _weight(pid: int) -> Weight | None:
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        words = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").split()
        comm = Path(f"/proc/{pid}/comm").read_text().rstrip("\n")
    except OSError:
        return None  # the process has ended
    module = words[words.index("-m") + 1] if "-m" in words else words[0]
    name = module.split(".")[-1] if comm.startswith("python") else comm
    found = {name: int(kib) * KIB for name, kib in re.findall(r"^(\w+): +(\d+) kB$", rollup, re.MULTILINE)}
    return Weight(name, found["Rss"], found["Pss"]) if "Pss" in found else None
