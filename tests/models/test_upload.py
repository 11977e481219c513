"""Bytes of files arrive in their tensors whatever the sizes, and a file that cannot be read is named."""

import threading
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from common.base.errors import ModelError
from common.models.loading import upload
from common.models.loading.upload import Part, Upload

SLOT_BYTES = 64
DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def small_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "SLOT_BYTES", SLOT_BYTES)


def write(path: Path, *tensors: Tensor) -> list[int]:
    """The tensors one after the other behind an odd byte; returns where each begins."""
    data, offsets = b"\0", []
    for tensor in tensors:
        offsets.append(len(data))
        data += tensor.view(torch.uint8).numpy().tobytes()
    path.write_bytes(data)
    return offsets


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_parts_of_every_size_and_type_fill_their_targets(device: str, dtype: torch.dtype, tmp_path: Path) -> None:
    sizes, types = (1, 15, 16, 17, 31, 32, 33, 1000, 0), (torch.bfloat16, torch.float16, torch.float32)
    sources = [torch.randn(size).to(type_) for size in sizes for type_ in types]
    paths = [tmp_path / "a", tmp_path / "b"]
    offsets = [write(path, *sources) for path in paths]
    targets = [[torch.zeros_like(source, dtype=dtype, device=device) for source in sources] for _ in paths]
    parts = [
        Part(path, offset, source.dtype, target)
        for path, begins, filled in zip(paths, offsets, targets, strict=True)
        for offset, source, target in zip(begins, sources, filled, strict=True)
    ]
    said: list[tuple[int, int]] = []
    Upload(parts, torch.device(device), lambda done, total: said.append((done, total))).wait()
    for filled in targets:
        assert all(torch.equal(t.cpu(), s.to(dtype)) for t, s in zip(filled, sources, strict=True))
    total_bytes = 2 * sum(s.numel() for s in sources) * dtype.itemsize
    assert said == sorted(said) and said[-1] == (total_bytes, total_bytes)


@pytest.mark.parametrize("device", DEVICES)
def test_a_file_that_ends_early_is_named(device: str, tmp_path: Path) -> None:
    path = tmp_path / "short.safetensors"
    path.write_bytes(b"\0" * 100)
    target = torch.zeros(1000, device=device)
    with pytest.raises(ModelError, match=r"short\.safetensors: ends after 100 bytes; fetch the model again"):
        Upload([Part(path, 0, torch.float32, target)], torch.device(device), lambda done, total: None).wait()


class WrongSetting(Exception):
    """What a start fails with."""


def test_what_fails_meanwhile_ends_the_reading(tmp_path: Path) -> None:
    sources = [torch.randn(16) for _ in range(4000)]
    path, begun, failed = tmp_path / "a", threading.Event(), threading.Event()
    parts = [Part(path, offset, torch.float32, torch.zeros(16)) for offset in write(path, *sources)]

    def is_slow(done: int, total: int) -> None:
        begun.set()
        failed.wait(60)
        time.sleep(0.001)

    reading = Upload(parts, torch.device("cpu"), is_slow)
    with pytest.raises(WrongSetting), reading:
        assert begun.wait(60)
        failed.set()
        raise WrongSetting
    assert 0 < reading.loaded_bytes < reading.total_bytes
    assert not any(thread.name.startswith("upload") for thread in threading.enumerate())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(3, 5, 7), (2, 100, 3), (40, 2, 2), (2, 3, 90)])
def test_a_target_in_another_order_than_the_file_is_filled(
    device: str, shape: tuple[int, int, int], tmp_path: Path
) -> None:
    """Rows are shorter and longer than a slot, which bounds the memory taken."""
    source, path = torch.randn(shape), tmp_path / "a"
    [offset] = write(path, source)
    target = torch.zeros(shape[2], shape[0], shape[1], device=device)
    part = Part(path, offset, torch.float32, target.permute(1, 2, 0), add=1.0)
    assert all(piece.num_bytes <= SLOT_BYTES for piece in part.split(SLOT_BYTES))
    Upload([part], torch.device(device), lambda done, total: None).wait()
    assert torch.equal(target.cpu(), source.permute(2, 0, 1) + 1.0)
