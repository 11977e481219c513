"""Published config.json files are accepted with their sizes, or refused by name."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.presets import PRESETS
from common.base.errors import ConfigError, ModelError
from common.memory.server.pools import MAX_BLOCK_BYTES
from common.models.loader import resolve_dtype, resolve_kv_dtype
from common.models.quantization.rules import formats_of
from common.models.reading import decoder_config
from common.models.settings import Settings
from common.models.sizes.attention import Attention
from common.wire.values.kv_layout import CacheKind

QWEN3_5_27B: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "image_token_id": 248056,
    "tie_word_embeddings": False,
    "text_config": {
        "attention_bias": False, "attention_dropout": 0.0, "attn_output_gate": True, "bos_token_id": None,
        "dtype": "bfloat16", "eos_token_id": 248044, "full_attention_interval": 4, "head_dim": 256,
        "hidden_act": "silu", "hidden_size": 5120, "initializer_range": 0.02, "intermediate_size": 17408,
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
        "linear_num_value_heads": 48, "linear_value_head_dim": 128, "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144, "mlp_only_layers": [], "model_type": "qwen3_5_text",
        "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False, "num_attention_heads": 24,
        "num_hidden_layers": 64, "num_key_value_heads": 4, "pad_token_id": None, "partial_rotary_factor": 0.25,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25,
            "rope_theta": 10000000, "rope_type": "default",
        },
        "tie_word_embeddings": False, "use_cache": True, "vocab_size": 248320,
    },
    "vision_config": {"depth": 27},
}  # fmt: skip
MISTRAL_SMALL: dict[str, Any] = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "dtype": "bfloat16",
    "model_type": "mistral3",
    "text_config": {
        "attention_dropout": 0.0, "dtype": "bfloat16", "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120,
        "initializer_range": 0.02, "intermediate_size": 32768, "max_position_embeddings": 131072,
        "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05, "rope_theta": 1000000000.0, "sliding_window": None, "use_cache": True,
        "vocab_size": 131072,
    },
    "vision_config": {"model_type": "pixtral"},
}  # fmt: skip
MISTRAL_V01 = MISTRAL_SMALL["text_config"] | {"sliding_window": 4096, "vocab_size": 32000, "rope_theta": 10000.0}
MINISTRAL_3: dict[str, Any] = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "dtype": "bfloat16",
    "model_type": "mistral3",
    "text_config": {
        "attention_dropout": 0.0, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
        "intermediate_size": 14336, "max_position_embeddings": 262144, "model_type": "ministral3",
        "num_attention_heads": 32, "num_hidden_layers": 34, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
        "rope_parameters": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0, "llama_4_scaling_beta": 0.1, "mscale": 1.0,
            "mscale_all_dim": 1.0, "original_max_position_embeddings": 16384, "rope_theta": 1000000.0,
            "rope_type": "yarn", "type": "yarn",
        },
        "sliding_window": None, "tie_word_embeddings": False, "use_cache": True, "vocab_size": 131072,
    },
    "vision_config": {"model_type": "pixtral"},
}  # fmt: skip
SMOLLM3: dict[str, Any] = {
    "architectures": ["SmolLM3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 128000, "eos_token_id": 128012, "hidden_act": "silu", "hidden_size": 2048,
    "initializer_range": 0.02, "intermediate_size": 11008, "layer_types": ["full_attention"] * 36,
    "max_position_embeddings": 65536, "max_window_layers": 28, "mlp_bias": False, "model_type": "smollm3",
    "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0] * 9, "num_attention_heads": 16,
    "num_hidden_layers": 36, "num_key_value_heads": 4, "pad_token_id": 128004, "pretraining_tp": 2,
    "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 5000000.0, "sliding_window": None,
    "torch_dtype": "bfloat16", "use_cache": False, "use_sliding_window": False, "vocab_size": 128256,
}  # fmt: skip
QWEN2: dict[str, Any] = PRESETS["qwen2.5-7b"]
FP8 = {"activation_scheme": "static", "quant_method": "fp8", "weight_block_size": None}


def test_qwen3_5_27b() -> None:
    config = decoder_config(Settings(QWEN3_5_27B, "config.json"))
    attention, states = config.cache_groups(16, "bfloat16")
    assert (attention.num_layers, attention.token_bytes) == (16, 65536)
    assert states.num_layers == 48 and states.block_bytes <= MAX_BLOCK_BYTES
    assert states.block_bytes == pytest.approx(48 * (48 * 128 * 128 + 10240 * 4) * 4, rel=0.05)
    assert 2 * config.step_weights(64) == pytest.approx(51.2e9, rel=0.02), "without the input's table of 2.5 GB"


def test_mistral_small() -> None:
    config = decoder_config(Settings(MISTRAL_SMALL, "config.json"))
    [group] = config.cache_groups(16, "bfloat16")
    assert group.token_bytes == 163_840
    assert config.layers[0].mixer.num_weights(5120) == 2 * (4096 + 1024) * 5120


def test_mistral_v01() -> None:
    [group] = decoder_config(Settings(MISTRAL_V01, "config.json")).cache_groups(16, "bfloat16")
    assert (group.kind, group.window) == (CacheKind.WINDOW, 4096)
    assert group.most_blocks(32768, 2048) == (4096 + 2048) // 16 + 1, "blocks out of sight are used again"


@pytest.mark.parametrize(
    ("hidden_size", "inner", "num_layers", "num_bytes"),
    [
        pytest.param(4096, 14336, 34, 139_264, id="8B"),
        pytest.param(5120, 16384, 40, 163_840, id="14B"),
        pytest.param(3072, 9216, 26, 106_496, id="3B"),
    ],
)
def test_ministral_3(hidden_size: int, inner: int, num_layers: int, num_bytes: int) -> None:
    sizes = {"hidden_size": hidden_size, "intermediate_size": inner, "num_hidden_layers": num_layers}
    published = MINISTRAL_3 | {"text_config": MINISTRAL_3["text_config"] | sizes}
    config = decoder_config(Settings(published, "config.json"))
    [group] = config.cache_groups(16, "bfloat16")
    assert group.token_bytes == num_bytes
    mixer = config.layers[0].mixer
    assert isinstance(mixer, Attention)
    assert mixer.rope.growth == (0.1, 16384)
    assert mixer.rope.factor == 1.0, "mscale and mscale_all_dim are equal"
    assert mixer.rope.inverse_frequencies[-1] == pytest.approx(1e6 ** (-126 / 128) / 16)


def test_smollm3() -> None:
    config = decoder_config(Settings(SMOLLM3, "config.json"))
    [group] = config.cache_groups(16, "bfloat16")
    assert group.token_bytes == 73_728
    assert config.num_weights == pytest.approx(3.075e9, rel=1e-3)
    assert config.tied_embeddings, "by default"
    mixers = [layer.mixer for layer in config.layers]
    turned = [len(mixer.rope.inverse_frequencies) for mixer in mixers if isinstance(mixer, Attention)]
    assert turned == [64, 64, 64, 0] * 9
    assert decoder_config(Settings(SMOLLM3 | {"no_rope_layers": None}, "config.json")) == config, "by the interval"


def without_kind(published: dict[str, Any]) -> dict[str, Any]:
    return published | {"text_config": published["text_config"] | {"model_type": None}}


@pytest.mark.parametrize("published", [MISTRAL_SMALL, QWEN3_5_27B])
def test_a_text_model_without_a_name_is_the_usual_one_of_what_it_stands_in(published: dict[str, Any]) -> None:
    named = decoder_config(Settings(published, "config.json"))
    assert decoder_config(Settings(without_kind(published), "config.json")) == named
    del (left_out := without_kind(published)["text_config"])["model_type"]
    assert decoder_config(Settings(published | {"text_config": left_out}, "config.json")) == named


def test_qwen2_has_biases_whatever_its_file_says() -> None:
    config = decoder_config(Settings(QWEN2, "config.json"))
    assert decoder_config(Settings(QWEN2 | {"attention_bias": False}, "config.json")) == config
    [mixer] = {layer.mixer for layer in config.layers}
    assert isinstance(mixer, Attention) and mixer.has_bias


@pytest.mark.parametrize(
    ("published", "message"),
    [
        (
            QWEN3_5_27B | {"text_config": QWEN3_5_27B["text_config"] | {"rope_parameters": {"type": "yarn"}}},
            "rope_type = 'yarn' is not supported, only 'default'",
        ),
        (
            MINISTRAL_3 | {"text_config": MINISTRAL_3["text_config"] | {"rope_parameters": None}},
            "rope_parameters are left out",
        ),
        (SMOLLM3 | {"no_rope_layers": [1, 0]}, r"no_rope_layers = \[1, 0\], 36 of 0 and 1 are needed"),
        (SMOLLM3 | {"use_sliding_window": True, "sliding_window": 4096}, "use_sliding_window = True is not supported"),
        (MISTRAL_V01 | {"model_type": "llama"}, "sliding_window = 4096 is not supported"),
        (MISTRAL_SMALL | {"text_config": {"model_type": "ministral"}}, "model_type = 'ministral' is not supported"),
        (
            MINISTRAL_3 | {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
            "weights in 'bitsandbytes' are not supported, only .* in 16 bits",
        ),
        (
            SMOLLM3 | {"compression_config": {"format": "pack-quantized"}},
            "compression_config: weights in 'pack-quantized' are not supported",
        ),
        (
            MISTRAL_V01 | {"quantization_config": {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}},
            "quant_algo = 'W4A8_AWQ' is not supported",
        ),
        (MISTRAL_V01 | {"quantization_config": {"bits": 4}}, "weights in .'bits': 4. are not supported"),
        (MISTRAL_SMALL | {"text_config": None}, "text_config = None, an object is needed"),
        ({"model_type": "gemma2"}, "model_type = 'gemma2'; supported: "),
        (
            QWEN3_5_27B | {"quantization_config": {"quant_method": "fp8", "weight_block_size": 128}},
            "quantization_config: weight_block_size = 128, a list of rows and columns is needed",
        ),
        (
            QWEN3_5_27B | {"text_config": QWEN3_5_27B["text_config"] | {"output_gate_type": "sigmoid"}},
            "output_gate_type = 'sigmoid' is not supported",
        ),
    ],
)
def test_others_are_refused_by_name(published: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        decoder_config(Settings(published, "config.json"))


def test_a_text_model_inside_another_is_quantized_as_the_outer_file_says() -> None:
    quantization = decoder_config(Settings(MINISTRAL_3 | {"quantization_config": FP8}, "config.json")).quantization
    assert quantization is not None and quantization.where == "config.json, text_config: quantization_config"
    assert formats_of(quantization, [["model.layers.0.mlp.up_proj"]]) != [None]


@pytest.mark.parametrize("preset", ["deepseek-v2-lite", "gemma3-4b", "gemma4-12b", "gpt-oss-20b"])
def test_float16_is_never_chosen_where_activations_exceed_it(preset: str) -> None:
    gpu, published = torch.device("cuda"), PRESETS[preset] | {"dtype": "float16"}
    config = decoder_config(Settings(published, "config.json"))
    assert resolve_dtype("auto", config, gpu) == "bfloat16"
    assert resolve_dtype("float32", config, gpu) == "float32"
    with pytest.raises(ConfigError, match="activations exceed 65504"):
        resolve_dtype("float16", config, gpu)


def test_keys_and_values_in_fp8_are_of_half_the_bytes_and_states_and_latents_stay() -> None:
    presets = [PRESETS[name] for name in ("qwen3.5-4b", "deepseek-v2-lite")]
    hybrid, latent = (decoder_config(Settings(preset, "config.json")) for preset in presets)
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert resolve_kv_dtype("auto", latent, "bfloat16", gpu) == "bfloat16"
    with pytest.raises(ConfigError, match="caches latents, not keys and values"):
        resolve_kv_dtype("fp8", latent, "bfloat16", gpu)
    with pytest.raises(ConfigError, match="for models in 16 bits"):
        resolve_kv_dtype("fp8", hybrid, "float32", gpu)
    assert resolve_kv_dtype("fp8", hybrid, "float32", cpu) == "float8_e4m3fn"
    (plain, states), (rounded, same_states) = (
        hybrid.cache_groups(16, resolve_kv_dtype(choice, hybrid, "bfloat16", gpu)) for choice in ("auto", "fp8")
    )
    assert (rounded.block_bytes * 2, same_states) == (plain.block_bytes, states)


def test_scales_of_keys_and_values_are_told_apart_in_fp8_only() -> None:
    config = decoder_config(Settings(PRESETS["qwen3-0.6b"], "config.json"))

    def scales(dtype: str, *pairs: tuple[float, float]) -> str:
        layers = list(config.layers)
        for number, pair in enumerate(pairs):
            mixer = layers[number].mixer
            assert isinstance(mixer, Attention)
            layers[number] = replace(layers[number], mixer=replace(mixer, kv_scales=pair))
        [group] = replace(config, layers=tuple(layers)).cache_groups(16, dtype)
        return group.scales

    assert scales("float8_e4m3fn") == scales("bfloat16", (0.5, 2.0)) == ""
    digests = {scales("float8_e4m3fn", *pairs) for pairs in ([(0.5, 2.0)], [(2.0, 0.5)], [(1.0, 1.0), (0.5, 2.0)])}
    assert len(digests) == 3 and "" not in digests
