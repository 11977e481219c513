import os
import stat
from pathlib import Path

import pytest

from deploy.processes.machine import MIB, detect_gpus, num_cores, parse_nvidia_smi
from deploy.processes.placement import Gpu


def fake_nvidia_smi(directory: Path, script: str) -> None:
    path = directory / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_parse_nvidia_smi_keeps_a_gpu_of_unknown_size_and_capability() -> None:
    listed = parse_nvidia_smi("0, 143771, 9.0\n1, [N/A], 12.0\n2, 10, [N/A]\n3, 10\n\n")
    assert listed == [Gpu(0, 143771 * MIB, (9, 0)), Gpu(1, 0, (12, 0)), Gpu(2, 10 * MIB), Gpu(3, 10 * MIB)]


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ({}, [Gpu(0, 10 * MIB, (8, 9)), Gpu(1, 20 * MIB, (9, 0))]),
        ({"CUDA_VISIBLE_DEVICES": "1"}, [Gpu(0, 20 * MIB, (9, 0))]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-aa,GPU-bb"}, [Gpu(0, 0), Gpu(1, 0)]),
        ({"CUDA_VISIBLE_DEVICES": ""}, []),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, []),
    ],
)
def test_detect_gpus_numbers_them_as_a_child_sees_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: dict[str, str], expected: list[Gpu]
) -> None:
    fake_nvidia_smi(tmp_path, "echo '0, 10, 8.9'; echo '1, 20, 9.0'")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert detect_gpus(visible) == expected


def test_a_broken_driver_falls_back_to_device_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvidia_smi(tmp_path, "exit 9")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr("deploy.processes.machine._gpus_of_device_files", lambda: [Gpu(3, 0)])
    assert detect_gpus({}) == [Gpu(3, 0)]


def test_there_is_a_core() -> None:
    assert num_cores() >= 1
