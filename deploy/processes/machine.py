"""Resources of this machine, found without importing torch or opening a CUDA context."""

import errno
import logging
import os
import resource
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from common.base.errors import ConfigError
from deploy.processes.placement import Gpu

logger = logging.getLogger(__name__)

NVIDIA_SMI_DEADLINE_S = 10.0
MIB = 1 << 20
ADDRESS_SPACE_BYTES = 2 << 30
"""Bytes mapped by a worker beside weights and KV blocks, mostly torch."""
SHORTAGES = {errno.ENOMEM, errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EDQUOT}


def detect_gpus(environ: Mapping[str, str]) -> list[Gpu]:
    """Return the GPUs visible to a child with environment `environ`, with CUDA's numbers there."""
    gpus = _gpus_of_driver()
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return gpus
    listed = [part for part in visible.split(",") if part.strip() and part.strip() != "-1"]
    known, unknown = {str(gpu.index): gpu for gpu in gpus}, Gpu(0, 0)
    found = (known.get(part.strip(), unknown) for part in listed)
    return [replace(gpu, index=number) for number, gpu in enumerate(found)] if gpus else []


def num_cores() -> int:
    """Return the number of CPU cores usable by this process."""
    return len(os.sched_getaffinity(0))


def require_address_space(num_bytes: int) -> None:
    """Raise ConfigError if `ulimit -v` leaves less than `num_bytes` plus the mappings of every worker."""
    limit, needed = resource.getrlimit(resource.RLIMIT_AS)[0], num_bytes + ADDRESS_SPACE_BYTES
    if resource.RLIM_INFINITY != limit < needed:
        raise ConfigError(
            f"a process may map {limit / 1e9:.2f} GB here (`ulimit -v`), a worker needs {needed / 1e9:.2f} GB: "
            "`ulimit -v unlimited`; memory is bounded by a container or a cgroup"
        )


def shortage(error: Exception) -> str:
    """Return the scarce resource of the system in words; "" for any other error."""
    if isinstance(error, OSError):
        return str(error) if error.errno in SHORTAGES else ""
    is_thread = "can't start new thread" in str(error)
    if not (is_thread or isinstance(error, MemoryError)):
        return ""
    names = {"-v": resource.RLIMIT_AS, "-u": resource.RLIMIT_NPROC, "-d": resource.RLIMIT_DATA}
    limits = {name: resource.getrlimit(number)[0] for name, number in names.items()}
    given = ", ".join(f"`ulimit {name}`" for name, limit in limits.items() if limit != resource.RLIM_INFINITY)
    return (
        f"no {'thread can be started' if is_thread else 'memory is left'}; see {given or 'the limits of its container'}"
    )


def _gpus_of_driver() -> list[Gpu]:
    try:
        output = subprocess.run(
            ["nvidia-smi", "--query-gpu=index,memory.total,compute_cap", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            check=True,
            timeout=NVIDIA_SMI_DEADLINE_S,
        ).stdout
    except FileNotFoundError:
        return _gpus_of_device_files()
    except (subprocess.SubprocessError, OSError) as error:
        logger.warning("nvidia-smi: %s; looking at /dev instead", error)
        return _gpus_of_device_files()
    return parse_nvidia_smi(output)


def parse_nvidia_smi(output: str) -> list[Gpu]:
    """Parse lines `index, MiB, X.Y` to GPUs; a missing size or capability counts as unknown."""
    gpus = []
    for line in output.splitlines():
        index, size, capability, *_ = (part.strip() for part in f"{line},,".split(","))
        if index.isdigit():
            gpu = Gpu(int(index), int(size) * MIB if size.isdigit() else 0)
            major, _, minor = capability.partition(".")
            is_known = major.isdigit() and minor.isdigit()
            gpus.append(replace(gpu, capability=(int(major), int(minor))) if is_known else gpu)
    return gpus


def _gpus_of_device_files() -> list[Gpu]:
    numbers = (path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia[0-9]*"))
    return [Gpu(index, 0) for index in sorted(int(number) for number in numbers if number.isdigit())]
