"""Kernels that threads load side by side keep their own launchers, although Triton's have one name."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from common.device.steps.launchers import launchers_apart


class Build:
    """Loads as Python does what it has loaded before: into the module that has the name."""

    def __init__(self) -> None:
        self.module = ModuleType("launcher")

    def _load_module_from_path(self, name: str, path: str) -> Any:
        vars(self.module)["launch"] = path
        return self.module


def loaded(build: Any, path: str, meeting: threading.Barrier) -> str:
    meeting.wait()
    module = build._load_module_from_path("launcher", path)
    time.sleep(0.001)  # the other threads get to run
    return str(module.launch)


@pytest.mark.parametrize("is_apart", [True, False])
def test_each_thread_gets_what_it_loaded(is_apart: bool) -> None:
    build, paths = Build(), [str(i) for i in range(8)]
    before = build._load_module_from_path
    meeting = threading.Barrier(len(paths))

    def load_all() -> list[str]:
        with ThreadPoolExecutor(len(paths)) as threads:
            return [got.result() for got in [threads.submit(loaded, build, path, meeting) for path in paths]]

    if is_apart:
        with launchers_apart(build):
            assert load_all() == paths
        assert build._load_module_from_path == before
    else:
        assert load_all() != paths, "nothing would show that they were kept apart"


def test_triton_has_what_is_replaced(tmp_path: Path) -> None:
    build = pytest.importorskip("triton.runtime.build")
    (tmp_path / "extension.py").write_text("launch = 7")
    with launchers_apart(build):
        loaded = build._load_module_from_path("extension", str(tmp_path / "extension.py"))
    assert isinstance(loaded, SimpleNamespace)
    assert loaded.launch == 7
