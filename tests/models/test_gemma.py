"""Gemma: published config.json files in both spellings, what is refused, and blocks out of a window's sight."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from common.base.errors import ModelError
from common.models.config import DecoderConfig
from common.models.reading import decoder_config
from common.models.settings import Settings
from common.models.sizes.attention import Attention
from common.wire.values.kv_layout import CacheKind
from tests.models.test_decoder import Cache, assert_close, load, prompts

GEMMA3_1B: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "attn_logit_softcapping": None, "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": [1, 106],
    "final_logit_softcapping": None, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152,
    "initializer_range": 0.02, "intermediate_size": 6912, "max_position_embeddings": 32768,
    "model_type": "gemma3_text", "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1,
    "pad_token_id": 0, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000,
    "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 262144,
}  # fmt: skip
GEMMA3_4B: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999, "eoi_token_index": 256000,
    "eos_token_id": [1, 106], "image_token_index": 262144, "initializer_range": 0.02, "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16", "vision_config": {"model_type": "siglip_vision_model"},
}  # fmt: skip
GEMMA3_27B: dict[str, Any] = GEMMA3_4B | {
    "text_config": {
        "head_dim": 128, "hidden_size": 5376, "intermediate_size": 21504, "model_type": "gemma3_text",
        "num_attention_heads": 32, "num_hidden_layers": 62, "num_key_value_heads": 16, "query_pre_attn_scalar": 168,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    },
}  # fmt: skip

KINDS = (["sliding_attention"] * 5 + ["full_attention"]) * 8
GEMMA4_12B: dict[str, Any] = {
    "architectures": ["Gemma4UnifiedForConditionalGeneration"],
    "dtype": "bfloat16", "image_token_id": 258880, "model_type": "gemma4_unified",
    "text_config": {
        "attention_bias": False, "attention_dropout": 0.0, "attention_k_eq_v": True, "bos_token_id": 2,
        "dtype": "bfloat16", "enable_moe_block": False, "eos_token_id": 1, "final_logit_softcapping": 30.0,
        "global_head_dim": 512, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 3840,
        "hidden_size_per_layer_input": 0, "initializer_range": 0.02, "intermediate_size": 15360, "layer_types": KINDS,
        "max_position_embeddings": 262144, "model_type": "gemma4_unified_text", "moe_intermediate_size": None,
        "num_attention_heads": 16, "num_experts": None, "num_global_key_value_heads": 1, "num_hidden_layers": 48,
        "num_key_value_heads": 8, "num_kv_shared_layers": 0, "pad_token_id": 0, "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
        "sliding_window": 1024, "tie_word_embeddings": True, "top_k_experts": None,
        "use_bidirectional_attention": "vision", "use_cache": True, "use_double_wide_mlp": False,
        "vocab_size": 262144, "vocab_size_per_layer_input": 262144,
    },
    "tie_word_embeddings": True, "vision_config": {"model_type": "gemma4_unified_vision"},
}  # fmt: skip
GEMMA4_31B: dict[str, Any] = GEMMA4_12B | {
    "architectures": ["Gemma4ForConditionalGeneration"],
    "model_type": "gemma4",
    "text_config": GEMMA4_12B["text_config"] | {
        "hidden_size": 5376, "intermediate_size": 21504, "layer_types": KINDS + KINDS[:12],
        "model_type": "gemma4_text", "num_attention_heads": 32, "num_global_key_value_heads": 4,
        "num_hidden_layers": 60, "num_key_value_heads": 16,
    },
}  # fmt: skip
GEMMA4_26B: dict[str, Any] = GEMMA4_31B | {
    "text_config": GEMMA4_31B["text_config"] | {
        "enable_moe_block": True, "hidden_size": 2816, "intermediate_size": 2112, "layer_types": KINDS[:30],
        "moe_intermediate_size": 704, "num_attention_heads": 16, "num_experts": 128, "num_global_key_value_heads": 2,
        "num_hidden_layers": 30, "num_key_value_heads": 8, "top_k_experts": 8,
    },
}  # fmt: skip


def text_of(published: dict[str, Any], **changes: object) -> dict[str, Any]:
    return published | {"text_config": published["text_config"] | changes}


def config_of(published: dict[str, Any]) -> DecoderConfig:
    return decoder_config(Settings(published, "config.json"))


def attentions(config: DecoderConfig) -> list[Attention]:
    return [layer.mixer for layer in config.layers if isinstance(layer.mixer, Attention)]


def test_gemma3_1b() -> None:
    config = config_of(GEMMA3_1B)
    window, full = config.cache_groups(16, "bfloat16")
    assert (window.kind, window.window, window.num_layers) == (CacheKind.WINDOW, 512, 22)
    assert (full.kind, full.num_layers, full.token_bytes) == (CacheKind.FULL, 4, 4096)
    assert config.step_weights(64) == pytest.approx(1.0e9, rel=0.01)
    assert config.tied_embeddings


def test_gemma3_4b_whose_file_leaves_most_sizes_out() -> None:
    config = config_of(GEMMA3_4B)
    window, full = config.cache_groups(16, "bfloat16")
    assert (window.token_bytes, full.token_bytes) == (118_784, 20_480)
    assert (config.vocab_size, config.max_positions) == (262_208, 131_072)
    assert config.step_weights(64) == pytest.approx(3.88e9, rel=0.01)
    near, far = attentions(config)[0].rope, attentions(config)[5].rope
    assert near.inverse_frequencies[64] == pytest.approx(10_000.0**-0.5)
    assert far.inverse_frequencies[64] == pytest.approx(1_000_000.0**-0.5 / 8.0)


def test_gemma3_27b() -> None:
    config = config_of(GEMMA3_27B)
    assert attentions(config)[0].scale == pytest.approx(168**-0.5)
    assert [layer.window for layer in attentions(config)].count(0) == 10
    assert config.step_weights(64) == pytest.approx(27.0e9, rel=0.01)


def test_both_spellings_are_the_same_model() -> None:
    old = GEMMA3_4B["text_config"] | {"vocab_size": 262_208, "max_position_embeddings": 131_072}
    kinds = ["full_attention" if number % 6 == 5 else "sliding_attention" for number in range(34)]
    new = {key: value for key, value in old.items() if key != "rope_scaling"} | {
        "dtype": "bfloat16",
        "layer_types": kinds,
        "rope_parameters": {
            "full_attention": {"factor": 8.0, "rope_theta": 1000000.0, "rope_type": "linear"},
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
    }
    assert config_of(old) == config_of(new)


def test_gemma4_12b() -> None:
    config = config_of(GEMMA4_12B)
    window, full = config.cache_groups(16, "bfloat16")
    assert (window.token_bytes, full.token_bytes) == (327_680, 16_384)
    assert (window.head_dim, full.head_dim, full.num_kv_heads) == (256, 512, 1)
    assert config.step_weights(64) == pytest.approx(11.9e9, rel=0.01)
    rope = attentions(config)[5].rope
    assert len(rope.inverse_frequencies) == 64
    assert rope.inverse_frequencies[32] == pytest.approx(1e6 ** (-64 / 512))


def test_gemma4_31b() -> None:
    config = config_of(GEMMA4_31B)
    window, full = config.cache_groups(16, "bfloat16")
    assert (window.token_bytes, full.token_bytes) == (819_200, 81_920)
    assert config.step_weights(64) == pytest.approx(30.7e9, rel=0.01)
    assert (config.logit_cap, attentions(config)[0].scale) == (30.0, 1.0)


def test_gemma4_26b_a4b() -> None:
    config = config_of(GEMMA4_26B)
    window, full = config.cache_groups(16, "bfloat16")
    assert (window.token_bytes, full.token_bytes) == (204_800, 20_480)
    assert config.num_weights == pytest.approx(25.2e9, rel=0.01)
    assert config.step_weights(1) == pytest.approx(3.8e9, rel=0.02)
    assert config.step_weights(10_000) == config.num_weights


def test_heads_by_layer_are_the_same_model() -> None:
    changes = {"global_head_dim": None, "num_global_key_value_heads": None}
    by_layer = {str(number): {"head_dim": 512, "num_key_value_heads": 4} for number in range(5, 60, 6)}
    assert config_of(text_of(GEMMA4_31B, **changes, per_layer_config=by_layer)) == config_of(GEMMA4_31B)


def test_values_of_their_own_have_as_many_heads_as_in_a_window() -> None:
    _, full = config_of(text_of(GEMMA4_31B, attention_k_eq_v=False)).cache_groups(16, "bfloat16")
    assert (full.head_dim, full.num_kv_heads) == (512, 16)


@pytest.mark.parametrize(
    ("published", "message"),
    [
        (text_of(GEMMA4_31B, hidden_size_per_layer_input=256), "inputs of each layer, as in Gemma 4 E2B and E4B"),
        (text_of(GEMMA4_31B, num_kv_shared_layers=18), "keys and values shared between layers, as in Gemma 4 E2B"),
        (text_of(GEMMA4_31B, use_bidirectional_attention="all"), "use_bidirectional_attention = 'all' is not supp"),
        (text_of(GEMMA4_31B, use_double_wide_mlp=True), "use_double_wide_mlp = True is not supported"),
        (text_of(GEMMA4_26B, top_k_experts=129), "top_k_experts = 129, a whole number of 1 to 128 is needed"),
        (text_of(GEMMA4_31B, per_layer_config=[1]), "per_layer_config = .1., an object of objects is needed"),
        (text_of(GEMMA4_31B, model_type="gemma4_unified_text"), "model_type = 'gemma4_unified_text' is not supported"),
        (GEMMA3_1B | {"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0 is not supported"),
        (GEMMA3_1B | {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0 is not supported"),
        (GEMMA3_1B | {"use_bidirectional_attention": True}, "use_bidirectional_attention = True is not supported"),
        (GEMMA3_1B | {"hidden_activation": "gelu"}, "hidden_activation = 'gelu' is not supported"),
        (GEMMA3_1B | {"layer_types": ["full_attention"]}, "layer_types = .'full_attention'., 26 of"),
        (GEMMA3_1B | {"rope_scaling": {"rope_type": "yarn", "factor": 8.0}}, "rope_type = 'yarn' is not supported"),
        (
            GEMMA3_1B | {"rope_parameters": {"rope_type": "linear"}},
            "an object is needed, of full_attention and sliding",
        ),
        (GEMMA3_1B | {"rope_parameters": [1]}, "rope_parameters = .1., an object is needed"),
        (GEMMA3_1B | {"num_attention_heads": 3, "num_key_value_heads": 2}, "3 query heads over 2 KV heads"),
        (GEMMA3_4B | {"text_config": {"model_type": "gemma2"}}, "model_type = 'gemma2' is not supported"),
    ],
)
def test_others_are_refused_by_name(published: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        config_of(published)


@torch.inference_mode()
def test_blocks_out_of_sight_are_not_read(checkpoint: Callable[[str], tuple[Path, Any]]) -> None:
    directory, theirs = checkpoint("gemma3")
    model = load(directory)
    cache = Cache(model)
    [ids] = prompts(90)
    blocks, logits = cache.blocks(90), []
    for begin, end in itertools.pairwise([0, 7, 40, 41, 42, 75, *range(80, 91)]):
        for group, pool, of_group in zip(cache.groups, cache.caches, blocks, strict=True):
            for place in range(group.first_seen(begin + 1)):
                pool[of_group[place]] = torch.nan
                of_group[place] = -1
        logits.append(model.forward(cache.batch([(ids[begin:end], begin, blocks)]), cache.ops))
    assert sum(place == -1 for place in blocks[0]) > 3
    assert_close(torch.cat(logits), theirs(torch.tensor([ids])).logits[0])
