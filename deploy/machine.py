"""What this machine has, found without importing torch or opening a CUDA context."""

import logging
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from deploy.placement import Gpu

logger = logging.getLogger(__name__)

NVIDIA_SMI_DEADLINE_S = 10.0
MIB = 1 << 20


def detect_gpus(environ: Mapping[str, str]) -> list[Gpu]:
    """The GPUs that a child with this environment sees, numbered as CUDA numbers them in it."""
    gpus = _gpus_of_driver()
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return gpus
    listed = [part for part in visible.split(",") if part.strip() and part.strip() != "-1"]
    sizes = {str(gpu.index): gpu.memory_bytes for gpu in gpus}
    return [Gpu(number, sizes.get(part.strip(), 0)) for number, part in enumerate(listed)] if gpus else []


def num_cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


def _gpus_of_driver() -> list[Gpu]:
    try:
        output = subprocess.run(
            ["nvidia-smi", "--query-gpu=index,memory.total", "--format=csv,noheader,nounits"],
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
    """GPUs from lines `index, MiB`; a size the driver does not tell counts as unknown."""
    gpus = []
    for line in output.splitlines():
        index, _, size = (part.strip() for part in line.partition(","))
        if index.isdigit():
            gpus.append(Gpu(int(index), int(size) * MIB if size.isdigit() else 0))
    return gpus


def _gpus_of_device_files() -> list[Gpu]:
    numbers = (path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia[0-9]*"))
    return [Gpu(index, 0) for index in sorted(int(number) for number in numbers if number.isdigit())]
