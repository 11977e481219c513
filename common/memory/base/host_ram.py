"""Host memory in total and available: the machine's, or the limit of a cgroup."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

ROOT = Path("/")
CGROUPS = "sys/fs/cgroup"


def ram_bytes(root: Path = ROOT) -> int:
    """Return the machine's memory, or the lowest limit of a cgroup of this process."""
    return min([meminfo("MemTotal", root), *(limit for limit, _ in _limits(root))])


def available_bytes(root: Path = ROOT) -> int:
    """Return the bytes available without swapping or killing any process."""
    return max(0, min([meminfo("MemAvailable", root), *(limit - used for limit, used in _limits(root))]))


def meminfo(what: str, root: Path = ROOT) -> int:
    """Return an entry of /proc/meminfo, in bytes."""
    with open(root / "proc/meminfo", encoding="ascii") as lines:
        sizes = {line.split(":")[0]: int(line.split()[1]) << 10 for line in lines}
    return sizes[what]


def _limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yield limit and use of each limited cgroup; the use excludes files that the kernel would drop."""
    for directory, limit, used in _cgroups(root):
        with suppress(OSError, ValueError):  # "max" is no limit
            most, now = int((directory / limit).read_text()), int((directory / used).read_text())
            yield most, now - _inactive_files(directory)


def _cgroups(root: Path) -> Iterator[tuple[Path, str, str]]:
    """Yield the cgroups of this process, innermost first: directory, file of the limit, file of the use."""
    memberships = (root / "proc/self/cgroup").read_text().splitlines() if (root / "proc/self/cgroup").exists() else []
    for line in memberships:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield from _upwards(root / CGROUPS, path, "memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            version_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")
            yield from _upwards(root / CGROUPS / "memory", path, *version_1)


def _upwards(top: Path, path: str, limit: str, used: str) -> Iterator[tuple[Path, str, str]]:
    """Yield a cgroup and its parents.

    In a container the path may be the host's path, of which only `top` exists.
    """
    directory = top / path.strip("/")
    for each in (directory, *directory.parents):
        if each.is_relative_to(top):
            yield each, limit, used


def _inactive_files(directory: Path) -> int:
    with suppress(OSError):
        for line in (directory / "memory.stat").read_text().splitlines():
            name, _, value = line.partition(" ")
            if name in ("inactive_file", "total_inactive_file"):
                return int(value)
    return 0
