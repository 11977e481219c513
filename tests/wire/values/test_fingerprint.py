"""A model's name follows from its weights: another tensor, another name."""

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType

from common.base.errors import ConfigError
from common.wire.values import fingerprint
from common.wire.values.fingerprint import files_described, model_fingerprint, tokenizer_fingerprint
from tests.support.gguf_files import every, tensors_of, write_gguf

SIZES = {"embed": 300_000, "q_proj": 70_000, "norm": 256, "bias": 2, "nothing": 0, "head": 300_000}
BYTES = {name: random.Random(size).randbytes(size) for name, size in SIZES.items()}


def _write(path: Path, tensors: dict[str, bytes], **said: object) -> None:
    """A file of safetensors."""
    header, end = {}, 0
    for name, data in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [end, end + len(data)], **said}
        end += len(data)
    encoded = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + b"".join(tensors.values()))


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    _write(tmp_path / "model.safetensors", BYTES)
    return tmp_path


@pytest.mark.parametrize("max_samples", [8192, 1])
def test_a_change_of_any_whole_tensor_shows(model_dir: Path, max_samples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "_MAX_SAMPLES", max_samples)
    names = {model_fingerprint(model_dir)}
    for name, data in BYTES.items():
        _write(model_dir / "model.safetensors", BYTES | {name: bytes(255 - byte for byte in data)})
        names.add(model_fingerprint(model_dir))
    assert len(names) == len(BYTES), "and there is one that has no bytes"


def test_a_change_of_an_end_or_of_what_is_said_of_a_tensor_shows(model_dir: Path) -> None:
    before = model_fingerprint(model_dir)
    _write(model_dir / "model.safetensors", BYTES | {"embed": BYTES["embed"][:-1] + b"\0"})
    assert model_fingerprint(model_dir) != before
    _write(model_dir / "model.safetensors", BYTES, dtype="I8")
    assert model_fingerprint(model_dir) != before
    _write(model_dir / "model.safetensors", {name.replace("q", "k"): data for name, data in BYTES.items()})
    assert model_fingerprint(model_dir) != before
    _write(model_dir / "model.safetensors", BYTES)
    (model_dir / "config.json").write_text("{ }")
    assert model_fingerprint(model_dir) != before


def test_which_file_has_a_tensor_makes_no_difference(model_dir: Path) -> None:
    before = model_fingerprint(model_dir)
    (model_dir / "model.safetensors").unlink()
    for number, name in enumerate(reversed(BYTES)):
        _write(model_dir / f"model-{number}.safetensors", {name: BYTES[name]})
    assert model_fingerprint(model_dir) == before


def test_a_description_of_files_shows_that_one_has_changed_and_fits_into_a_message(model_dir: Path) -> None:
    os.utime(model_dir / "config.json", (0, 0))
    os.utime(model_dir / "model.safetensors", (1e9, 1e9))
    size_gb = sum(file.stat().st_size for file in model_dir.iterdir()) / 1e9
    assert (
        files_described(model_dir)
        == f"{model_dir}, 2 files of {size_gb:.3f} GB, last changed 2001-09-09 01:46:40+00:00"
    )
    os.utime(model_dir / "model.safetensors", (1e9 + 1, 1e9 + 1))
    assert files_described(model_dir).endswith("01:46:41+00:00")
    deep = model_dir / ("x" * 200) / "é\n"
    shutil.copytree(model_dir, deep, ignore=lambda *_: ["x" * 200])
    assert files_described(deep).isascii() and files_described(deep).isprintable() and len(files_described(deep)) < 200
    assert files_described(model_dir / "none") == ""


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff" * 8 + b"{}", b"\2" + bytes(7) + b"[]", b"\7" + bytes(7) + b'{"a":1}', b"\2" + bytes(7) + b"{x",
     b"\x40" + bytes(7) + b'{"a":{"dtype":"U8","shape":[9],"data_offsets":[0,9]}}'.ljust(64)],
)  # fmt: skip
def test_what_is_no_file_of_tensors_is_named(model_dir: Path, content: bytes) -> None:
    (model_dir / "model-2.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=r"model-2\.safetensors: not a safetensors file .*; fetch the model again"):
        model_fingerprint(model_dir)


Checkpoint = Callable[[str], tuple[Path, Any]]


def test_a_gguf_file_has_the_name_of_its_tensors_and_settings(checkpoint: Checkpoint, tmp_path: Path) -> None:
    directory, _ = checkpoint("qwen3-tied")
    plain = write_gguf(tmp_path / "plain.gguf", directory)
    parts = write_gguf(tmp_path / "parts.gguf", directory, split_tensors=7)
    name = model_fingerprint(plain)
    assert len(name) == 16 and name == model_fingerprint(parts), "in parts too"
    changed = {each: tensor.clone() for each, tensor in tensors_of(directory).items()}
    changed["blk.2.ffn_up.weight"][-1, -1] += 1.0
    others = {
        "contents": write_gguf(tmp_path / "contents.gguf", directory, changes=changed),
        "type": write_gguf(tmp_path / "type.gguf", directory, every(GGMLQuantizationType.Q8_0)),
        "settings": write_gguf(tmp_path / "s.gguf", directory, metadata=lambda writer: writer.add_sliding_window(4)),
        "tensors": write_gguf(tmp_path / "t.gguf", directory, changes={"output.weight": torch.zeros(300, 64)}),
    }
    assert len({name, *map(model_fingerprint, others.values())}) == 1 + len(others)
    assert len({tokenizer_fingerprint(path) for path in (plain, parts, *others.values())}) == 1
    other = write_gguf(tmp_path / "o.gguf", directory, metadata=lambda writer: writer.add_add_bos_token(True))
    assert tokenizer_fingerprint(other) != tokenizer_fingerprint(plain)
    assert model_fingerprint(other) == name
