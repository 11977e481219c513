"""Every kernel compiles for every kind of GPU, with the tiles chosen there, and fits into its shared memory.

No GPU is needed: see `offline`. What was compiled once Triton finds on disk the next time.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "common" / "kernels"
SHARED_BYTES = {
    "8.0": 163 << 10,
    "8.6": 99 << 10,
    "8.9": 99 << 10,
    "9.0": 227 << 10,
    "10.0": 227 << 10,
    "12.0": 99 << 10,
}
HOPPER = KERNELS / "attention" / "hopper"
BESIDE_HOPPER = KERNELS / "attention" / "shared_division.py"  # for a kernel of that room
PARTS = (("9.0", "8.6", "8.9"), ("8.0", "10.0", "12.0"))  # each takes a process about as long
MARKS: dict[str, Any] = {"9.0": ()}  # the others are not in `make test-all`

pytestmark = [pytest.mark.timeout(1800), pytest.mark.medium]


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> dict[str, list[tuple[str, int]]]:
    """Name and shared bytes of each kernel, by capability that a test is to be run for."""
    wanted = {
        test.callspec.params["capability"]
        for test in request.session.items
        if isinstance(test, pytest.Function) and test.path == Path(__file__)
    }
    command = [sys.executable, "-m", "tests.kernels.offline"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    parts = [[capability for capability in part if capability in wanted] for part in PARTS]
    processes = [
        subprocess.Popen([*command, *part], cwd=ROOT, **pipes)  # type: ignore[call-overload]
        for part in parts
        if part
    ]
    kernels: dict[str, list[tuple[str, int]]] = {capability: [] for capability in SHARED_BYTES}
    for process in processes:
        lines, errors = process.communicate(timeout=1700)
        assert process.returncode == 0, errors[-3000:]
        for capability, name, shared_bytes in map(json.loads, lines.splitlines()):
            kernels[capability].append((name, shared_bytes))
    return kernels


def kernels_of(*paths: Path) -> set[str]:
    return {name for path in paths for name in re.findall(r"^def (\w*_kernel)\(", path.read_text(), re.MULTILINE)}


@pytest.mark.parametrize(
    "capability", [pytest.param(each, marks=MARKS.get(each, pytest.mark.gpu_types)) for each in SHARED_BYTES]
)
def test_every_kernel_compiles_and_fits(capability: str, compiled: dict[str, list[tuple[str, int]]]) -> None:
    sources = sorted(KERNELS.rglob("*.py"))
    by_hopper = [path for path in sources if "gluon.language.nvidia.hopper" in path.read_text()]
    hopper_only = kernels_of(*by_hopper, *HOPPER.glob("*.py"), BESIDE_HOPPER)
    expected = kernels_of(*sources) - (set() if capability == "9.0" else hopper_only)
    assert {name for name, _ in compiled[capability]} == expected
    for name, shared_bytes in compiled[capability]:
        assert shared_bytes <= SHARED_BYTES[capability], f"{name} takes {shared_bytes} bytes of shared memory"
