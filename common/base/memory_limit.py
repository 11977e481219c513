"""Limits by the kernel of the memory that a process may take which works on what a client sent."""

import resource
import sys
from pathlib import Path


def memory_in_use() -> int:
    """Count the bytes that this process has mapped, as `limit_memory` does."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    (num_kib,) = [int(line.split()[1]) for line in lines if line.startswith("VmData:")]
    return num_kib * 1024


def limit_memory(num_bytes: int, in_use: int | None = None) -> None:
    """Let this process map that many bytes more than it has now; no core file if it wants more.

    Args:
        in_use: that of `memory_in_use`, if it is known.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        in_use = memory_in_use() if in_use is None else in_use
        resource.setrlimit(resource.RLIMIT_DATA, (in_use + num_bytes,) * 2)
