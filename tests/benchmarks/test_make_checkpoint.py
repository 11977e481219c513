import json
from math import prod
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.make_checkpoint import packed_names, split_shards, weight_shapes, write_weights
from benchmarks.presets import PRESETS


@pytest.mark.parametrize(
    ("preset", "num_parameters"),
    [
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-4b", 4_022_468_096),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-32b", 32_762_123_264),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("llama3.1-8b", 8_030_261_248),
        ("qwen2.5-7b", 7_615_616_512),
        ("mistral-7b-v0.3", 7_248_023_552),
        ("gemma3-4b", 3_880_263_168),
        ("gemma4-12b", 11_907_350_320),
    ],
)
def test_presets_have_the_published_number_of_parameters(preset: str, num_parameters: int) -> None:
    assert sum(prod(shape) for shape in weight_shapes(PRESETS[preset]).values()) == num_parameters


def test_shards_hold_every_tensor_once_within_the_limit() -> None:
    shapes = weight_shapes(PRESETS["qwen3-8b"])
    shards = list(split_shards(shapes))
    assert [name for shard in shards for name in shard] == list(shapes)
    assert all(sum(2 * prod(shape) for shape in shard.values()) <= 5e9 for shard in shards)
    assert len(shards) == 4


def test_written_weights_are_what_the_index_says(tmp_path: Path) -> None:
    shapes = {"a.weight": (64, 8), "norm.weight": (8,), "b.weight": (64, 8)}
    total_bytes = write_weights(shapes, tmp_path, seed=0, max_bytes=1100)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == total_bytes == 2 * 64 * 8 * 2 + 16
    loaded = {name: load_file(tmp_path / file)[name] for name, file in index["weight_map"].items()}
    assert {name: tuple(tensor.shape) for name, tensor in loaded.items()} == shapes
    assert all(tensor.dtype == torch.bfloat16 for tensor in loaded.values())
    assert torch.equal(loaded["norm.weight"], torch.ones(8, dtype=torch.bfloat16))
    assert 0.015 < loaded["a.weight"].float().std().item() < 0.025
    assert not torch.equal(loaded["a.weight"], loaded["b.weight"])


def test_packed_weights_are_bytes(tmp_path: Path) -> None:
    config = PRESETS["gpt-oss-20b"]
    packed, shapes = packed_names(config), weight_shapes(config)
    name = "model.layers.0.mlp.experts.down_proj_blocks"
    assert name in packed and shapes[name] == (32, 2880, 90, 16)
    write_weights({name: (2, 32, 3, 16)}, tmp_path, seed=0, packed=packed)
    assert load_file(tmp_path / "model.safetensors")[name].dtype == torch.uint8


def test_a_single_shard_needs_no_index(tmp_path: Path) -> None:
    write_weights({"a.weight": (4, 4)}, tmp_path, seed=0)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
