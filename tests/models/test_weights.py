"""A checkpoint that cannot be served is refused with the names of what is wrong."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from common.base.errors import ModelError
from common.models.families.llama import FACTORS
from common.models.loading.upload import Progress
from common.models.loading.weights import load_weights, weights_layout
from common.models.reading import decoder_config, read_config
from common.models.settings import Settings
from common.models.sizes.attention import Attention
from tests.support.checkpoints import write_checkpoint

DEMO_MODEL = Path(__file__).parents[2] / "deploy" / "demo_model"


QWEN3 = json.loads((DEMO_MODEL / "config.json").read_text())
ROPE_KEYS = ["rope_type", "rope_theta", *FACTORS]
LLAMA3 = {**QWEN3, "model_type": "llama", "rope_parameters": None, "partial_rotary_factor": None, "mlp_bias": None}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_checkpoint("qwen3-tied", tmp_path)
    return tmp_path


def load(directory: Path) -> dict[str, torch.Tensor]:
    return load_onto(torch.device("cpu"), torch.float32, directory)


def load_onto(
    device: torch.device, dtype: torch.dtype, directory: Path, progress: Progress = lambda done, total: None
) -> dict[str, torch.Tensor]:
    config = read_config(directory)
    layout = weights_layout(config.stacks(), dtype)
    region = torch.empty(layout.num_bytes, dtype=torch.uint8, device=device)
    load_weights(directory, layout, region, ignored=config.ignored, progress=progress).wait()
    return layout.tensors(region)


def change(directory: Path, **changes: torch.Tensor | None) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in changes.items():
        tensors.pop(name.replace("__", "."), None)
        if tensor is not None:
            tensors[name.replace("__", ".")] = tensor
    save_file(tensors, path)


def change_config(directory: Path, **changes: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_progress_reaches_the_whole(directory: Path) -> None:
    said: list[tuple[int, int]] = []
    load_onto(torch.device("cpu"), torch.float32, directory, lambda done, total: said.append((done, total)))
    assert said[-1][0] == said[-1][1] == sum(t.numel() * 4 for t in load(directory).values())
    assert said == sorted(said)


def test_a_missing_tensor_is_named(directory: Path) -> None:
    change(directory, model__layers__1__mlp__up_proj__weight=None)
    with pytest.raises(ModelError, match=r"1 missing tensors: model\.layers\.1\.mlp\.up_proj\.weight"):
        load(directory)


def test_an_extra_tensor_is_named(directory: Path) -> None:
    change(directory, model__layers__0__self_attn__q_proj__bias=torch.zeros(128))
    with pytest.raises(ModelError, match=r"1 unexpected tensors: model\.layers\.0\.self_attn\.q_proj\.bias"):
        load(directory)


def test_a_misshapen_tensor_is_named_with_both_shapes(directory: Path) -> None:
    change(directory, model__norm__weight=torch.zeros(63))
    with pytest.raises(ModelError, match=r"model\.norm\.weight is \[63\], config\.json says \[64\]"):
        load(directory)


def test_a_tensor_of_integers_is_refused(directory: Path) -> None:
    change(directory, model__norm__weight=torch.zeros(64, dtype=torch.int8))
    with pytest.raises(ModelError, match=r"model\.norm\.weight is I8, supported are BF16, F16, F32"):
        load(directory)


def test_a_tied_checkpoint_may_carry_its_head_and_old_rotary_buffers(directory: Path) -> None:
    change(
        directory,
        lm_head__weight=load_file(directory / "model.safetensors")["model.embed_tokens.weight"].double(),
        model__layers__0__self_attn__rotary_emb__inv_freq=torch.zeros(16),
    )
    load(directory)


@pytest.mark.parametrize("make", [torch.zeros_like, torch.Tensor.t, lambda table: table[:299]])
def test_a_tied_checkpoint_with_another_head_is_refused(
    directory: Path, make: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    table = load_file(directory / "model.safetensors")["model.embed_tokens.weight"]
    change(directory, lm_head__weight=make(table).contiguous())
    with pytest.raises(ModelError, match=r"holds another lm_head\.weight; set tie_word_embeddings to false"):
        load(directory)


def test_a_truncated_file_is_named(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ModelError, match=r"model\.safetensors: not a safetensors file.*fetch the model again"):
        load(directory)


def test_a_lost_shard_is_named(directory: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"files that are not there: model-00001-of-00002\.safetensors"):
        load(directory)


def test_no_weights_at_all(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"neither model\.safetensors nor"):
        load(directory)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, r"model_type = 'mamba'; supported: .*gemma3, .*llama, .*mistral"),
        ({"hidden_act": "gelu"}, r"hidden_act = 'gelu' is not supported, only 'silu'"),
        ({"num_hidden_layers": -1}, r"num_hidden_layers = -1, a whole number of 1 to 4096 is needed"),
        ({"num_hidden_layers": 10**9}, r"num_hidden_layers = 1000000000, a whole number of 1 to 4096 is needed"),
        (
            {"max_position_embeddings": 10**10},
            r"max_position_embeddings = 10000000000, a whole number of 1 to 16777216",
        ),
        ({"rope_parameters": {"rope_theta": 10**400}}, r"rope_theta = 10+, a positive number is needed"),
        ({"use_sliding_window": True}, r"use_sliding_window = True is not supported"),
        ({"num_key_value_heads": 3}, r"4 query heads over 3 KV heads"),
        ({"rope_parameters": {"rope_type": "linear"}}, r"RoPE scaling 'linear' is not supported"),
        ({"rope_parameters": {"rope_type": "yarn"}}, r"RoPE scaling: factor = None, a positive number is needed"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 4, "rope_theta": 1}},
            r"rope_theta = 1\.0, more than 1 is needed",
        ),
        ({"rope_parameters": {"rope_theta": "big"}}, r"rope_theta = 'big'"),
        ({"rope_parameters": {"rope_theta": float("inf")}}, r"rope_theta = inf, a positive number is needed"),
        ({"rope_parameters": [1]}, r"rope_parameters = \[1\], an object is needed"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, r"partial_rotary_factor = 0\.5 is not supported, only 1"),
        ({"partial_rotary_factor": 0.25}, r"partial_rotary_factor = 0\.25 is not supported, only 1"),
        ({"head_dim": 33}, r"head_dim = 33, an even number is needed"),
        ({"head_dim": None, "hidden_size": 66}, r"hidden_size = 66 cannot be divided among 4 heads; add the head_dim"),
        ({"tie_word_embeddings": "false"}, r"tie_word_embeddings = 'false', true or false is needed"),
        ({"rms_norm_eps": float("nan")}, r"rms_norm_eps = nan, a positive number is needed"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, r"layer_types has sliding_attention, only"),
        ({"layer_types": "full_attention"}, r"layer_types has 'full_attention', only"),
        (
            {"quantization_config": {"quant_method": "hqq"}},
            r"quantization_config: weights in 'hqq' are not supported, only fp8, .*gptq",
        ),
    ],
)
def test_a_config_that_would_compute_something_else_is_refused(
    directory: Path, changes: dict[str, object], message: str
) -> None:
    change_config(directory, **changes)
    with pytest.raises(ModelError, match=message):
        read_config(directory)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"factor": 0}, r"factor = 0 of RoPE scaling, a positive number is needed"),
        ({"factor": "8"}, r"factor = '8' of RoPE scaling"),
        ({"low_freq_factor": None}, r"low_freq_factor = None of RoPE scaling"),
        ({"original_max_position_embeddings": -1}, r"original_max_position_embeddings = -1 of RoPE scaling"),
        ({"high_freq_factor": 1.0}, r"low_freq_factor = 1 of RoPE scaling, less than high_freq_factor 1 is needed"),
    ],
)
def test_rotary_factors_that_give_no_frequencies_are_refused(
    changes: dict[str, object], message: str, tmp_path: Path, checkpoint: Callable[[str], tuple[Path, Any]]
) -> None:
    values = json.loads((checkpoint("llama3-scaled")[0] / "config.json").read_text())
    table = "rope_parameters" if "rope_parameters" in values else "rope_scaling"
    (tmp_path / "config.json").write_text(json.dumps({**values, table: {**values[table], **changes}}))
    with pytest.raises(ModelError, match=message):
        read_config(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", "null", '{"a":' * 100_000])
def test_an_unreadable_config_is_named(directory: Path, content: str) -> None:
    (directory / "config.json").write_text(content)
    with pytest.raises(ModelError, match=r"config\.json: .*fetch the model again"):
        read_config(directory)


NUMBERS = st.integers() | st.floats() | st.sampled_from([10**9, 10**10, 10**400, 5e-324, 1e308, -1, 0, 1, 2])
VALUES = st.recursive(
    st.none() | st.booleans() | st.text(max_size=5) | NUMBERS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(ROPE_KEYS), inner, max_size=5),
    max_leaves=8,
)
YARN_KEYS = ("factor", "rope_theta", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale")
SCALINGS = st.fixed_dictionaries({"rope_type": st.just("llama3"), **dict.fromkeys(FACTORS, NUMBERS)})
SCALINGS |= st.fixed_dictionaries({"rope_type": st.just("yarn"), **dict.fromkeys(YARN_KEYS, NUMBERS)})


@pytest.mark.medium
@given(base=st.sampled_from([QWEN3, LLAMA3]), key=st.sampled_from(sorted(LLAMA3)), value=VALUES, rope=VALUES | SCALINGS)
@settings(max_examples=400)
def test_whatever_a_config_says_it_is_computed_or_refused(
    base: dict[str, Any], key: str, value: object, rope: object
) -> None:
    try:
        config = decoder_config(Settings({**base, "rope_parameters": rope, key: value}, "x/config.json"))
    except ModelError as error:
        assert str(error).startswith("x/config.json: ")
        assert len(str(error)) < 500
    else:
        [heads] = config.heads
        assert max(len(config.layers), heads.num_q_heads, heads.head_dim) <= 4096
        mixer = config.layers[0].mixer
        assert isinstance(mixer, Attention)
        assert all(0.0 < frequency < math.inf for frequency in mixer.rope.inverse_frequencies)


@pytest.mark.parametrize(
    "content",
    [
        "[]", "5", "null", "{", "{}", "[" * 100_000,
        '{"weight_map": []}', '{"weight_map": 5}', '{"weight_map": {"a": 5}}',
        '{"weight_map": {"a": ""}}', '{"weight_map": {"a": "\\u0000"}}', json.dumps({"weight_map": {"a": "b" * 9999}}),
    ],
)  # fmt: skip
def test_a_broken_index_is_named(directory: Path, content: str) -> None:
    (directory / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ModelError, match=r"index\.json: .*fetch the model again"):
        load(directory)


def test_a_tensor_that_is_not_where_the_index_has_it_is_named(directory: Path) -> None:
    names = list(load_file(directory / "model.safetensors"))
    save_file({"other": torch.zeros(1)}, directory / "other.safetensors")
    index = {"weight_map": {**dict.fromkeys(names, "model.safetensors"), "model.norm.weight": "other.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"model\.norm\.weight is not in other\.safetensors, where the index has it"):
        load(directory)
