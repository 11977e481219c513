"""Published config.json files of gpt-oss are accepted with their sizes; packed experts load as they are."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.base.errors import ModelError
from common.base.routing import Route
from common.models.config import DecoderConfig
from common.models.loading.weights import load_weights, weights_layout
from common.models.reading import decoder_config
from common.models.settings import Settings
from common.models.sizes.attention import Attention
from common.models.sizes.experts import ExpertNames, Experts
from common.models.sizes.stacks import Source
from common.ops.reference.mxfp4 import from_mxfp4
from tests.support.mxfp4 import to_mxfp4

GPT_OSS_20B: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0, "eos_token_id": 200002,
    "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096,
    "initializer_range": 0.02, "intermediate_size": 2880, "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072, "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4,
    "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32, "output_router_logits": False,
    "pad_token_id": 199999,
    "quantization_config": {
        "modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
        ],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
        "rope_type": "yarn", "truncate": False,
    },
    "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
    "tie_word_embeddings": False, "use_cache": True, "vocab_size": 201088,
}  # fmt: skip
GPT_OSS_120B = {
    key: value
    for key, value in GPT_OSS_20B.items()
    if key not in ("layer_types", "num_experts_per_tok", "swiglu_limit", "hidden_act")
} | {"num_hidden_layers": 36, "num_local_experts": 128}


def read(published: dict[str, Any]) -> DecoderConfig:
    return decoder_config(Settings(published, "config.json"))


@pytest.mark.parametrize(
    ("published", "num_bytes", "floors_ms"),
    [(GPT_OSS_20B, 13.8e9, {1: 0.80, 8: 2.00, 64: 3.09}), (GPT_OSS_120B, 65.2e9, {1: 1.08, 8: 3.67, 64: 12.6})],
    ids=["20b", "120b"],
)
def test_sizes(published: dict[str, Any], num_bytes: float, floors_ms: dict[int, float]) -> None:
    """Floors: of decode steps at 1,024 tokens, on a GPU that reads 4.66 TB/s."""
    config = read(published)
    layers = published["num_hidden_layers"]
    window, full = config.cache_groups(16, "bfloat16")
    assert (window.window, full.window, full.token_bytes) == (128, 0, 1024 * layers)
    assert weights_layout(config.stacks(), torch.bfloat16).num_bytes == pytest.approx(num_bytes, rel=0.01)
    for rows, floor_ms in floors_ms.items():
        read_bytes = 2 * config.step_weights(rows) + rows * (1024 * full.token_bytes + 128 * window.token_bytes)
        assert read_bytes / 4.66e9 == pytest.approx(floor_ms, rel=0.03)
    mixer = config.layers[0].mixer
    assert isinstance(mixer, Attention) and mixer.window == 128, "the first layer sees a window"
    assert mixer.rope.factor == pytest.approx(1.3466, rel=1e-4)


def test_16_bit_experts_are_read_where_no_quantization_is_named() -> None:
    experts = read(GPT_OSS_20B | {"quantization_config": None}).layers[0].mlp
    assert isinstance(experts, Experts) and experts.transposed and not experts.is_mxfp4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"swiglu_limit": 10.0}, r"swiglu_limit = 10\.0 is not supported, only 7\.0"),
        ({"swiglu_alpha": 1.0}, r"swiglu_alpha = 1\.0 is not supported, only 1\.702"),
        ({"rope_scaling": None}, "rope_parameters are left out"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported, only 'silu'"),
        ({"attention_bias": False}, "attention_bias = False is not supported, only True"),
        ({"layer_types": ["full_attention"]}, "layer_types = .*24 of full_attention, sliding_attention are needed"),
        ({"quantization_config": {"quant_method": "fp8"}}, "weights in 'fp8' are not supported, .* 16 bits or mxfp4"),
        ({"quantization_config": "mxfp4"}, "quantization_config: weights in 'mxfp4' are not supported"),
        ({"hidden_size": 2881}, "hidden_size = 2881, a multiple of 32 is needed"),
        ({"num_experts_per_tok": 33}, "num_experts_per_tok = 33, a whole number of 1 to 32"),
    ],
)
def test_others_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read(GPT_OSS_20B | change)


HIDDEN, INNER, NUM = 64, 32, 3
EXPERTS = Experts(
    NUM, INNER, Route(2), alternates=True, is_mxfp4=True, names=ExpertNames(router="mlp.router")
)  # fmt: skip


def write(directory: Path) -> dict[str, torch.Tensor]:
    """Write packed experts; return their matrices, gate above up."""
    gate_up, down = torch.randn(NUM, 2 * INNER, HIDDEN), torch.randn(NUM, HIDDEN, INNER)
    tensors, rounded = {"m.mlp.router.weight": torch.randn(NUM, HIDDEN)}, {}
    for name, matrix in (("gate_up", gate_up), ("down", down)):
        blocks, scales = to_mxfp4(matrix)
        rounded[name] = from_mxfp4(blocks, scales)
        if name == "gate_up":
            order = torch.arange(2 * INNER).view(2, INNER).t().flatten()
            blocks, scales = blocks[:, order], scales[:, order]
        tensors[f"m.mlp.experts.{name}_proj_blocks"] = blocks.unflatten(-1, (-1, 16)).contiguous()
        tensors[f"m.mlp.experts.{name}_proj_scales"] = scales.contiguous()
    save_file(tensors, directory / "model.safetensors")
    return rounded


def load(directory: Path) -> dict[str, torch.Tensor]:
    layout = weights_layout(EXPERTS.stacks(Source(HIDDEN), "m"), torch.bfloat16)
    region = torch.full((layout.num_bytes,), 255, dtype=torch.uint8)
    load_weights(directory, layout, region, ignored=(), progress=lambda done, total: None).wait()
    return layout.tensors(region)


def test_packed_experts_load_as_they_are_with_gates_above_ups(tmp_path: Path) -> None:
    rounded = write(tmp_path)
    loaded = load(tmp_path)
    for name, matrix in rounded.items():
        data, scales = loaded[f"experts_{name}"], loaded[f"experts_{name}_scales"]
        assert data.dtype == scales.dtype == torch.uint8
        assert torch.equal(from_mxfp4(data, scales), matrix.flatten(0, 1))


def test_packed_experts_of_another_type_are_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["m.mlp.experts.down_proj_scales"] = tensors["m.mlp.experts.down_proj_scales"].float()
    save_file(tensors, path)
    with pytest.raises(ModelError, match=r"down_proj_scales is F32, supported are U8"):
        load(tmp_path)
