"""What a process that works on what a client sent may take of memory, by the kernel's word."""

import resource
import sys
from pathlib import Path


def limit_memory(num_bytes: int) -> None:
    """Let this process map that many bytes more than it has now; no core file if it wants more."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        (num_kib,) = [int(line.split()[1]) for line in lines if line.startswith("VmData:")]
        resource.setrlimit(resource.RLIMIT_DATA, (num_kib * 1024 + num_bytes,) * 2)
