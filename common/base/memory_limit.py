"""Kernel limits on the memory of a process, for work on a client's input."""

import resource
import sys
from pathlib import Path


def memory_in_use() -> int:
    """Count the bytes that the process has mapped, by the kernel's measure for `limit_memory`."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    (num_kib,) = [int(line.split()[1]) for line in lines if line.startswith("VmData:")]
    return num_kib * 1024


def limit_memory(num_bytes: int, in_use: int | None = None) -> None:
    """Let the process map `num_bytes` more than now, and dump no core.

    Args:
        in_use: result of `memory_in_use`, if known.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        in_use = memory_in_use() if in_use is None else in_use
        resource.setrlimit(resource.RLIMIT_DATA, (in_use + num_bytes,) * 2)
