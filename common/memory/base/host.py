"""Identity of this host, where workers reach each other's memory servers by path; new at each of its starts."""

from contextlib import suppress
from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
MAX_LENGTH = 200
"""Characters of a label in a message."""


def host_id(advertise: str = "") -> str:
    """Return the kernel's id of this boot with `net.advertise`, or "" if the kernel tells none.

    Pods of one machine have the same boot id but addresses of their own, and do not reach each other's sockets.
    """
    with suppress(OSError):
        return f"{BOOT_ID.read_text().strip()} {advertise}".strip()[:MAX_LENGTH]
    return ""
