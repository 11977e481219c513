"""Triton's hash of itself is computed once for its files, and again when they or what is kept have changed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

import triton
from triton import knobs
from triton.runtime import cache

from common.device.steps import triton_hash


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], int]:
    """Keep a hash, and return how often it was computed; nothing of it outlives the test."""
    computed: list[str] = []

    def compute() -> str:
        computed.append("")
        return f"{triton.__version__}-{len(computed)}"

    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path / "cache"))
    monkeypatch.setattr(triton_hash, "_files", lambda package: [["libtriton.so", 5, 7]])

    def keep() -> int:
        monkeypatch.setattr(cache, "triton_key", compute)
        key = triton_hash.begin_triton_key()()
        assert cache.triton_key() == key, "Triton uses what was kept"
        return int(key.rpartition("-")[2])

    return keep


def test_it_is_read_from_disk_until_a_file_changes(hashed: Callable[[], int], monkeypatch: pytest.MonkeyPatch) -> None:
    assert [hashed(), hashed()] == [1, 1]
    monkeypatch.setattr(triton_hash, "_files", lambda package: [["libtriton.so", 5, 8]])
    assert [hashed(), hashed()] == [2, 2]


@pytest.mark.parametrize("kept", ["", "{", "[]", "{}", '{"files": [["libtriton.so", 5, 7]], "key": 3}'])
def test_what_cannot_be_read_is_written_anew(kept: str, hashed: Callable[[], int], tmp_path: Path) -> None:
    hashed()
    (tmp_path / "cache" / triton_hash.FILE).write_text(kept)
    assert [hashed(), hashed()] == [2, 2]


def test_a_directory_that_cannot_be_written_costs_time_alone(hashed: Callable[[], int], tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("no directory")
    assert [hashed(), hashed()] == [1, 2]


def test_all_files_that_triton_hashes_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    real: Any = open

    def noting(path: Any, *args: Any) -> Any:
        opened.append(str(path))
        return real(path, *args)

    monkeypatch.setattr(cache, "open", noting, raising=False)
    files = {str(path) for path, *_ in triton_hash._files(Path(triton.__file__).parent)}
    cache.triton_key.__wrapped__()  # without what it remembers
    assert len(opened) > 10
    assert set(opened) <= files
    json.dumps(sorted(files))
