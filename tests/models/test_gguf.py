"""A GGUF file's model computes what the directory's does, in every type; other files are refused by name."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from common.base.errors import ConfigError, ModelError
from common.checkpoint.gguf.config import config_of
from common.checkpoint.gguf.header import Value
from common.checkpoint.gguf.model_file import read_gguf
from common.checkpoint.gguf.special_tokens import end_ids_of, tokenizer_config_of
from common.checkpoint.gguf.tokenizer import tokenizer_json_of
from common.models.loading import gguf_weights
from common.models.loading.gguf_weights import load_gguf_weights
from common.models.loading.weights import load_weights, weights_layout
from common.models.reading import decoder_config, read_config
from common.models.settings import Settings
from tests.models.gguf.test_unpacking import legal_blocks
from tests.models.test_decoder import CPU, Cache, assert_close, errors, load, prompts
from tests.support.checkpoints import EXPERTS, SHAPE, VARIANTS, YARN, write_checkpoint
from tests.support.gguf_files import every, tensors_of, unpacked, write_gguf

Checkpoint = Callable[[str], tuple[Path, Any]]
FILES = ["llama", "llama3-scaled", "mistral", "qwen2-tied", "qwen2-odd-group", "qwen3-tied", "qwen3-untied"]
OTHERS = {
    "qwen3-moe-every-layer": ("qwen3_moe", EXPERTS | {"norm_topk_prob": True, "tie_word_embeddings": False}),
    "qwen3-yarn-whole": ("qwen3", {"rope_parameters": YARN | {"factor": 4.0}}),
    "wide-llama": (
        "llama",
        {
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_attention_heads": 8,
            "num_hidden_layers": 2,
            "tie_word_embeddings": False,
        },
    ),
}


@pytest.fixture
def written(checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checkpoint:
    """Write a variant of the tests, or one of `OTHERS`."""

    def get(variant: str) -> tuple[Path, Any]:
        if variant in VARIANTS:
            return checkpoint(variant)
        monkeypatch.setitem(VARIANTS, variant, OTHERS[variant])
        return tmp_path, write_checkpoint(variant, tmp_path)

    return get


@torch.inference_mode()
def logits(path: Path) -> torch.Tensor:
    model = load(path)
    cache = Cache(model)
    ragged = prompts(1, 37, 200)
    return model.forward(cache.batch([(ids, 0, cache.blocks(len(ids))) for ids in ragged]), cache.ops)


@torch.inference_mode()
def expected_logits(theirs: Any) -> torch.Tensor:
    return torch.cat([theirs(torch.tensor([ids])).logits[0] for ids in prompts(1, 37, 200)])


def loaded(path: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    config = read_config(path)
    layout = weights_layout(config.stacks(), dtype)
    region = torch.empty(layout.num_bytes, dtype=torch.uint8)
    if path.is_dir():
        load_weights(path, layout, region, ignored=config.ignored, progress=lambda done, total: None).wait()
    else:
        load_gguf_weights(
            path, layout, region, head_dim=config.heads[0].head_dim, progress=lambda done, total: None
        ).wait()
    return layout.tensors(region)


@pytest.mark.parametrize("variant", [*FILES, "qwen3-moe-every-layer", "qwen3-yarn-whole"])
def test_logits_equal_transformers(variant: str, written: Checkpoint, tmp_path: Path) -> None:
    directory, theirs = written(variant)
    path = write_gguf(tmp_path / "m.gguf", directory)
    assert_close(logits(path), expected_logits(theirs), CPU)


@pytest.mark.parametrize("split", [0, 7])
def test_a_mixture_of_types_in_parts_has_the_package_s_numbers(split: int, written: Checkpoint, tmp_path: Path) -> None:
    directory, _ = written("llama")
    kinds = [Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.F16, Type.BF16, Type.F32]
    chosen: dict[str, Type] = {}

    def choose(name: str) -> Type:
        return chosen.setdefault(name, Type.F32 if "norm" in name else kinds[len(chosen) % len(kinds)])

    path = write_gguf(tmp_path / "m.gguf", directory, choose, split_tensors=split)
    assert set(chosen.values()) == set(kinds)
    plain = {name: unpacked(tensor, chosen[name]) for name, tensor in tensors_of(directory).items()}
    same = write_gguf(tmp_path / "same.gguf", directory, changes=plain)
    ours, expected = loaded(path), loaded(same)
    assert all(torch.equal(ours[name], expected[name]) for name in expected)


@pytest.mark.parametrize("kind", [Type.Q4_K, Type.Q5_K, Type.Q6_K], ids=lambda kind: str(kind.name))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_super_blocks_land_in_their_rows(kind: Type, dtype: torch.dtype, written: Checkpoint, tmp_path: Path) -> None:
    """Rows of Q and K too, which stand elsewhere than in the file."""
    directory, _ = written("wide-llama")
    plain, packed = tensors_of(directory), {}
    for number, (name, tensor) in enumerate(plain.items()):
        if "norm" not in name:
            blocks = legal_blocks(kind.name, 1000 + number)
            size = tensor.numel() // 256
            packed[name] = np.resize(blocks, (size, blocks.shape[1])).reshape(*tensor.shape[:-1], -1)
    path = write_packed(tmp_path / "packed.gguf", directory, packed, kind)
    golden = {name: torch.from_numpy(gguf.quants.dequantize(data, kind)) for name, data in packed.items()}
    same = write_gguf(tmp_path / "same.gguf", directory, changes=golden)
    ours, expected = loaded(path, dtype), loaded(same, dtype)
    assert all(torch.equal(ours[name], expected[name]) for name in expected)


def test_a_scale_that_is_not_finite_is_refused_with_tensor_and_place(written: Checkpoint, tmp_path: Path) -> None:
    directory, _ = written("wide-llama")
    name = "blk.1.ffn_up.weight"
    tensor = tensors_of(directory)[name]
    blocks = np.resize(legal_blocks("Q4_K"), (tensor.numel() // 256, 144))
    blocks[11, 2:4] = 0xFF  # of the minimums
    path = write_packed(tmp_path / "m.gguf", directory, {name: blocks.reshape(tensor.shape[0], -1)}, Type.Q4_K)
    place = read_gguf(path).tensors[name].begin + 11 * 144
    with pytest.raises(ModelError, match=rf"m\.gguf: blk\.1\.ffn_up\.weight has a scale .* at byte {place}; fetch"):
        loaded(path)


def write_packed(path: Path, directory: Path, packed: dict[str, np.ndarray], kind: Type) -> Path:
    """Write a model with the blocks of some tensors as they are."""

    def add(writer: gguf.GGUFWriter) -> None:
        for name, data in packed.items():
            writer.add_tensor(name, data, raw_dtype=kind)

    return write_gguf(path, directory, changes=dict.fromkeys(packed), metadata=add)


def test_rows_of_q_and_k_as_they_stand_give_other_logits(
    written: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, theirs = written("llama")
    path = write_gguf(tmp_path / "m.gguf", directory)
    monkeypatch.setattr(gguf_weights, "turned_back", lambda piece, head_dim: piece)
    mean, _ = errors(logits(path), expected_logits(theirs))
    assert mean > 0.05


def test_without_its_rope_factors_a_model_gives_other_logits(written: Checkpoint, tmp_path: Path) -> None:
    directory, theirs = written("llama3-scaled")
    path = write_gguf(tmp_path / "m.gguf", directory, changes={"rope_freqs.weight": None})
    mean, _ = errors(logits(path), expected_logits(theirs))
    assert mean > 1e-3


CHANGES: dict[str, tuple[dict[str, torch.Tensor | None], str]] = {
    "missing": ({"blk.1.ffn_up.weight": None}, r"1 missing tensors: blk\.1\.ffn_up\.weight; serve another file"),
    "unexpected": ({"blk.0.attn_q.bias": torch.zeros(128)}, r"1 unexpected tensors: blk\.0\.attn_q\.bias"),
    "misshapen": ({"output_norm.weight": torch.zeros(63)}, r"output_norm\.weight is \[63\], the metadata says \[64\]"),
    "factors": ({"rope_freqs.weight": torch.ones(7)}, r"rope_freqs\.weight has 7 factors for 16 rotary frequencies"),
    "zero": ({"rope_freqs.weight": torch.zeros(16)}, r"rope_freqs\.weight has numbers that are not positive"),
    "table": ({"token_embd.weight": None}, r"has no matrix token_embd\.weight"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_tensors_that_are_not_the_model_s_are_named(name: str, written: Checkpoint, tmp_path: Path) -> None:
    directory, _ = written("llama")
    changes, message = CHANGES[name]
    path = write_gguf(tmp_path / "m.gguf", directory, changes=changes)
    with pytest.raises(ModelError, match=message):
        loaded(path)


def _add_yarn(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_float32("llama.rope.scaling.attn_factor", 2.0)


ENTRIES: dict[str, tuple[Callable[[gguf.GGUFWriter], None], str]] = {
    "experts": (lambda writer: writer.add_expert_count(8), r"llama\.expert_count = 8: experts are supported for"),
    "scaling": (
        lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR),
        r"m\.gguf: RoPE scaling 'linear' is not supported",
    ),
    "a factor alone": (lambda writer: writer.add_rope_scaling_factor(4.0), r"RoPE scaling 'linear' is not supported"),
    "an old factor": (
        lambda writer: writer.add_float32("llama.rope.scale_linear", 2.0),
        r"RoPE scaling 'linear' is not supported",
    ),
    "part of a head": (lambda writer: writer.add_rope_dimension_count(8), r"partial_rotary_factor = 0\.25"),
    "values": (lambda writer: writer.add_value_length(8), r"value_length = 8, and key_length = 32"),
    "layers": (lambda writer: writer.add_block_count(0), r"num_hidden_layers = 0"),
    "a text": (lambda writer: writer.add_string("llama.rope.freq_base", "x"), r"rope\.freq_base = 'x', a number"),
    "yarn": (_add_yarn, r"llama\.rope\.scaling\.attn_factor = 2\.0 is not supported"),
}  # fmt: skip


@pytest.mark.parametrize("name", ENTRIES)
def test_metadata_that_would_change_the_computation_is_refused(name: str, written: Checkpoint, tmp_path: Path) -> None:
    directory, _ = written("llama")
    add, message = ENTRIES[name]

    def changed(writer: gguf.GGUFWriter) -> None:
        entries = writer.kv_data[0]
        before = dict(entries)
        entries.clear()
        add(writer)
        entries.update({key: value for key, value in before.items() if key not in entries})

    path = write_gguf(tmp_path / "m.gguf", directory, metadata=changed)
    with pytest.raises(ModelError, match=message):
        read_config(path)


def test_a_file_without_the_epsilon_of_norms_is_refused(written: Checkpoint, tmp_path: Path) -> None:
    directory, _ = written("llama")
    key = "llama.attention.layer_norm_rms_epsilon"
    path = write_gguf(tmp_path / "m.gguf", directory, metadata=lambda writer: writer.kv_data[0].__delitem__(key))
    with pytest.raises(ModelError, match=rf"{key} is missing; serve another file of this model"):
        read_config(path)


def _add_more(writer: gguf.GGUFWriter) -> None:
    """Entries that tiny files lack."""
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(2.0)
    writer.add_rope_scaling_orig_ctx_len(256)
    writer.add_sliding_window(4)
    writer.add_bos_token_id(0)
    writer.add_add_bos_token(True)
    writer.add_chat_template("x")
    writer.add_expert_count(0)


def test_a_value_of_any_type_is_taken_or_refused(written: Checkpoint, tmp_path: Path) -> None:
    """No entry of the metadata ends a program in another way."""
    directory, _ = written("qwen3-tied")
    model = read_gguf(write_gguf(tmp_path / "m.gguf", directory, metadata=_add_more))
    values: tuple[Value, ...] = (0, -1, 1 << 40, 1.5, math.nan, math.inf, True, "x", "", (1, 2), ("a",), (1.5,), ())
    refused = 0
    for key, value in itertools.product(model.metadata, values):
        changed = replace(model, metadata={**model.metadata, key: value})
        try:
            decoder_config(Settings(config_of(changed), "m.gguf"))
            tokenizer_json_of(changed)
            tokenizer_config_of(changed)
            end_ids_of(changed)
        except (ConfigError, ModelError) as error:
            assert "m.gguf" in str(error), key
            refused += 1
    assert refused > 4 * len(model.metadata)


def test_another_architecture_is_refused(written: Checkpoint, tmp_path: Path) -> None:
    directory, _ = written("llama")
    path = write_gguf(
        tmp_path / "m.gguf",
        directory,
        metadata=lambda writer: writer.kv_data[0].__setitem__(
            "general.architecture", gguf.GGUFValue("mamba", gguf.GGUFValueType.STRING)
        ),
    )
    with pytest.raises(ModelError, match=r"'mamba' is not supported in GGUF, only llama, qwen2, .*serve the model's"):
        read_config(path)


def test_a_window_in_the_metadata_is_kept(written: Checkpoint, tmp_path: Path) -> None:
    directory, theirs = written("mistral-window")
    path = write_gguf(tmp_path / "m.gguf", directory, metadata=lambda writer: writer.add_sliding_window(24))
    assert_close(logits(path), expected_logits(theirs), CPU)


def test_a_head_of_its_own_size_is_told_or_follows(written: Checkpoint, tmp_path: Path) -> None:
    directory, _ = written("mistral")
    assert read_config(write_gguf(tmp_path / "m.gguf", directory)).heads[0].head_dim == 64 != SHAPE["head_dim"]


def test_the_types_of_matrices_are_chosen_by_name() -> None:
    assert every(Type.Q8_0)("blk.0.attn_norm.weight") == Type.F32
