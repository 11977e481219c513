"""Parts of a split file make one model, and what is no model, or not all of one, is refused by name."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest

from common.base.errors import ConfigError
from common.checkpoint.gguf.model_file import parts_of, read_gguf
from tests.support.gguf_files import write_gguf

Checkpoint = Callable[[str], tuple[Path, Any]]


@pytest.fixture
def parts(checkpoint: Checkpoint, tmp_path: Path) -> list[Path]:
    directory, _ = checkpoint("qwen3-tied")
    write_gguf(tmp_path / "m.gguf", directory, split_tensors=10)
    return sorted(tmp_path.glob("*.gguf"))


def test_parts_are_one_model_whichever_is_named(parts: list[Path], checkpoint: Checkpoint, tmp_path: Path) -> None:
    directory, _ = checkpoint("qwen3-tied")
    whole = read_gguf(write_gguf(tmp_path / "whole.gguf", directory))
    assert len(parts) == 4
    for part in parts:
        assert parts_of(part) == parts
        model = read_gguf(part)
        assert model.path == parts[0]
        assert {name: each.shape for name, each in model.tensors.items()} == {
            name: each.shape for name, each in whole.tensors.items()
        }
        assert model.metadata.items() >= {
            (key, value) for key, value in whole.metadata.items() if key != "general.alignment"
        }


def test_a_missing_part_is_named(parts: list[Path]) -> None:
    parts[2].unlink()
    wanted = r"parts are missing: m-00003-of-00004\.gguf; put all 4 into one directory"
    with pytest.raises(ConfigError, match=wanted):
        read_gguf(parts[0])


def test_a_renamed_part_tells_how_it_should_be_named(parts: list[Path], tmp_path: Path) -> None:
    shutil.copy(parts[1], tmp_path / "model.gguf")
    with pytest.raises(ConfigError, match=r"part 1 of 4 .*NAME-00001-of-00005\.gguf"):
        read_gguf(tmp_path / "model.gguf")


def test_a_part_of_another_model_is_noticed(parts: list[Path]) -> None:
    shutil.copy(parts[1], parts[2])
    with pytest.raises(ConfigError, match=r"m-00003-of-00004\.gguf: .* is in another part too"):
        read_gguf(parts[0])


@pytest.mark.parametrize("name", ["m-00009-of-00004.gguf", "m-00000-of-00004.gguf", "m-00001-of-90000.gguf"])
def test_a_number_beyond_the_parts_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the name is that of part"):
        parts_of(tmp_path / name)


@pytest.mark.parametrize(
    ("kind", "message"),
    [("mmproj", "mmproj"), ("adapter", "general.type = 'adapter', only 'model' can be served"), ("clip", "mmproj")],
)
def test_a_file_beside_a_model_is_refused(kind: str, message: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    writer = gguf.GGUFWriter(path, "clip" if kind == "clip" else "llama")
    if kind != "clip":
        writer.add_type(kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError, match=re.escape(message)):
        read_gguf(path)
