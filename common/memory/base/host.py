"""Identity of this host: equal in all containers of a machine, new at each of its starts."""

from contextlib import suppress
from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def host_id() -> str:
    """Return the kernel's id of this boot, or "" if the kernel tells none."""
    with suppress(OSError):
        return BOOT_ID.read_text().strip()
    return ""
