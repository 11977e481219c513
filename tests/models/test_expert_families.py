"""Published config.json files of models with experts are accepted with their sizes, or refused by name."""

from typing import Any

import pytest

from common.base.errors import ModelError
from common.models.config import DecoderConfig
from common.models.reading import decoder_config
from common.models.settings import Settings
from common.models.sizes.attention import Attention

QWEN3_30B_A3B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 151643, "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 6144, "max_position_embeddings": 40960,
    "max_window_layers": 48, "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768,
    "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8,
    "num_hidden_layers": 48, "num_key_value_heads": 4, "output_router_logits": False, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": None,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True, "use_sliding_window": False,
    "vocab_size": 151936,
}  # fmt: skip
QWEN3_6_35B_A3B: dict[str, Any] = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "model_type": "qwen3_5_moe",
    "image_token_id": 248056,
    "tie_word_embeddings": False,
    "text_config": {
        "attention_bias": False, "attention_dropout": 0.0, "attn_output_gate": True, "dtype": "bfloat16",
        "eos_token_id": 248044, "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu",
        "hidden_size": 2048, "initializer_range": 0.02, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32", "max_position_embeddings": 262144, "mlp_only_layers": [],
        "model_type": "qwen3_5_moe_text", "moe_intermediate_size": 512, "mtp_num_hidden_layers": 1,
        "num_attention_heads": 16, "num_experts": 256, "num_experts_per_tok": 8, "num_hidden_layers": 40,
        "num_key_value_heads": 2, "output_gate_type": "swish", "output_router_logits": False,
        "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25,
            "rope_theta": 10000000, "rope_type": "default",
        },
        "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 512, "use_cache": True,
        "vocab_size": 248320,
    },
    "vision_config": {"depth": 27},
}  # fmt: skip
QWEN3_NEXT_80B: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 151643, "decoder_sparse_step": 1, "eos_token_id": 151645, "full_attention_interval": 4,
    "head_dim": 256, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_value_head_dim": 128, "max_position_embeddings": 262144, "mlp_only_layers": [],
    "model_type": "qwen3_next", "moe_intermediate_size": 512, "norm_topk_prob": True, "num_attention_heads": 16,
    "num_experts": 512, "num_experts_per_tok": 10, "num_hidden_layers": 48, "num_key_value_heads": 2,
    "output_router_logits": False, "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-06, "rope_scaling": None,
    "rope_theta": 10000000, "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True, "use_sliding_window": False,
    "vocab_size": 151936,
}  # fmt: skip


def test_qwen3_30b_a3b() -> None:
    config = decoder_config(Settings(QWEN3_30B_A3B, "config.json"))
    [group] = config.cache_groups(16, "bfloat16")
    assert group.token_bytes == 98_304
    assert 2 * config.step_weights(0) == pytest.approx(2.46e9, rel=0.01), "without any expert"
    assert 2 * config.num_weights == pytest.approx(60.4e9, rel=0.01)
    assert_floors(config, {1: 1.33, 8: 5.72, 64: 14.15})
    names = [piece.checkpoint_name for stack in config.stacks().values() for piece in stack.pieces]
    assert sum(".experts." in name for name in names) == 18_432


def test_qwen3_6_35b_a3b() -> None:
    """A token reads the shared expert beside eight others."""
    config = decoder_config(Settings(QWEN3_6_35B_A3B, "config.json"))
    attention, states = config.cache_groups(16, "bfloat16")
    assert attention.token_bytes == 20_480 and states.num_layers == 30
    assert 2 * (config.num_weights + 248_320 * 2048) == pytest.approx(69.3e9, rel=0.01)
    assert_floors(config, {1: 1.30, 8: 4.19, 64: 14.90}, state_bytes=64.4e6)
    shape = config.stacks()["layers.0.experts_gate_up"].shape
    assert shape == (257 * 1024, 2048), "the shared expert is the last"


def test_qwen3_next_80b() -> None:
    config = decoder_config(Settings(QWEN3_NEXT_80B, "config.json"))
    assert 2 * (config.num_weights + 151_936 * 2048) == pytest.approx(159e9, rel=0.01)
    assert_floors(config, {1: 1.57, 8: 6.03, 64: 27.1}, state_bytes=77.3e6)
    mixer = config.layers[3].mixer
    assert isinstance(mixer, Attention) and len(mixer.rope.inverse_frequencies) == 32, "a quarter of 256 turns"


def assert_floors(config: DecoderConfig, floors_ms: dict[int, float], state_bytes: float = 0.0) -> None:
    """Check the floors of decode steps at 1,024 tokens, on a GPU that reads 4.66 TB/s."""
    token_bytes = sum(group.token_bytes for group in config.cache_groups(16, "bfloat16") if group.grows)
    for rows, floor_ms in floors_ms.items():
        num_bytes = 2 * config.step_weights(rows) + rows * (1024 * token_bytes + 2 * state_bytes)
        assert num_bytes / 4.66e9 == pytest.approx(floor_ms, rel=0.03)


@pytest.mark.parametrize(
    ("published", "message"),
    [
        (QWEN3_30B_A3B | {"num_experts_per_tok": 129}, "num_experts_per_tok = 129, a whole number of 1 to 128"),
        (QWEN3_30B_A3B | {"mlp_only_layers": "none"}, "mlp_only_layers = 'none', a list of numbers of layers"),
        (
            QWEN3_NEXT_80B | {"shared_expert_intermediate_size": 700},
            "shared_expert_intermediate_size = 700, a multiple of moe_intermediate_size = 512",
        ),
        (
            QWEN3_6_35B_A3B | {"text_config": QWEN3_6_35B_A3B["text_config"] | {"norm_topk_prob": False}},
            "norm_topk_prob = False is not supported",
        ),
    ],
)
def test_others_are_refused_by_name(published: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        decoder_config(Settings(published, "config.json"))
