"""A fault of a device is told from an error after which it works."""

import subprocess
import sys
import threading

import pytest
import torch

from common.device.engine import fault

TEXT = "CUDA error: an illegal memory access was encountered"


def pretend(monkeypatch: pytest.MonkeyPatch, error: Exception | None) -> None:
    """That a GPU is in use, and answers with that error."""

    def synchronize() -> None:
        if error is not None:
            raise error

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)


def test_a_device_that_answers_everything_with_an_error_met_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, torch.AcceleratorError(f"{TEXT}\nCUDA kernel errors might be reported later"))
    assert fault.device_fault() == TEXT


def test_one_that_works_or_was_not_used_did_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fault.device_fault() == ""
    pretend(monkeypatch, None)
    assert fault.device_fault() == ""


def test_nobody_waits_for_ever_for_one_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()
    pretend(monkeypatch, None)
    monkeypatch.setattr(torch.cuda, "synchronize", ended.wait)
    monkeypatch.setattr(fault, "ANSWER_S", 0.01)
    assert fault.device_fault() == ""
    ended.set()


PROGRAM = """
import torch
from common.device.engine.fault import device_fault
device = torch.device("cuda")
try:
    torch.empty(1 << 50, dtype=torch.uint8, device=device)
except torch.OutOfMemoryError:
    print("short", repr(device_fault()))
try:
    torch.zeros(4, device=device)[torch.tensor([1 << 20], device=device)].cpu()
except RuntimeError:
    print("fault", device_fault() != "")
"""


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False)
    assert ended.stdout == "short ''\nfault True\n", ended.stderr
