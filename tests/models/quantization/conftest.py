"""Quantized checkpoints that several files of tests use."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.checkpoints import write_checkpoint
from tests.support.packed_checkpoints import CASES, SIZES, pack_checkpoint

Written = tuple[Path, Path]


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Written]:
    """`written(case)` -> (packed checkpoint, the same made plain); each is written once."""
    done: dict[str, Written] = {}

    def get(case: str) -> Written:
        if case not in done:
            packed, plain = tmp_path_factory.mktemp("packed"), tmp_path_factory.mktemp("plain")
            write_checkpoint("qwen3-untied", packed, sizes=SIZES, dtype=torch.bfloat16)
            pack_checkpoint(packed, plain, CASES[case]())
            done[case] = packed, plain
        return done[case]

    return get


@pytest.fixture
def packed(written: Callable[[str], Written], tmp_path: Path) -> Callable[[str], Path]:
    """`packed(case)` -> a copy of the checkpoint, to be changed."""

    def copy(case: str) -> Path:
        for file in written(case)[0].iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
        return tmp_path

    return copy
