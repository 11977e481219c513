"""Published config.json files of models with latent attention are accepted with their sizes, or refused by name."""

from typing import Any

import pytest

from benchmarks.presets import PRESETS
from common.base.errors import ModelError
from common.base.routing import Score
from common.models.config import DecoderConfig
from common.models.reading import decoder_config
from common.models.settings import Settings
from common.models.sizes.experts import Experts
from common.models.sizes.latent import Latent
from common.wire.values.kv_layout import CacheKind

V2_LITE = PRESETS["deepseek-v2-lite"]
V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 0,
    "eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168,
    "initializer_range": 0.02, "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840,
    "model_type": "deepseek_v3", "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8,
    "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128,
    "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
    "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": False,
    "topk_group": 4, "topk_method": "noaux_tc", "torch_dtype": "bfloat16", "use_cache": True, "v_head_dim": 128,
    "vocab_size": 129280,
}  # fmt: skip
KIMI_K2 = V3 | {
    "architectures": ["DeepseekV3ForCausalLM"], "first_k_dense_replace": 1, "max_position_embeddings": 131072,
    "model_type": "kimi_k2", "n_group": 1, "n_routed_experts": 384, "num_attention_heads": 64,
    "num_key_value_heads": 64, "num_nextn_predict_layers": 0,
    "rope_scaling": V3["rope_scaling"] | {"beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0},
    "rope_theta": 50000.0, "routed_scaling_factor": 2.827, "topk_group": 1, "vocab_size": 163840,
}  # fmt: skip
FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}


def read(published: dict[str, Any]) -> DecoderConfig:
    return decoder_config(Settings(published, "config.json"))


def attention_of(config: DecoderConfig) -> Latent:
    [latent] = config.latents
    return latent


def test_deepseek_v2_lite() -> None:
    config = read(V2_LITE)
    [group] = config.cache_groups(16, "bfloat16")
    assert (group.kind, group.token_bytes) == (CacheKind.LATENT, 31_104), "expanded, it would be 276,480"
    assert attention_of(config).scale == pytest.approx(192**-0.5 * 1.2608**2, rel=1e-4)
    assert 2 * (config.num_weights + 102_400 * 2048) == pytest.approx(31.4e9, rel=0.01)
    for rows, floor_ms in {1: 1.06, 8: 3.90, 16: 5.48, 64: 7.08}.items():
        num_bytes = 2 * config.step_weights(rows) + rows * 1024 * group.token_bytes
        assert num_bytes / 4.66e9 == pytest.approx(floor_ms, rel=0.05)


@pytest.mark.parametrize(("published", "num_heads", "num_bytes"), [(V3, 128, 671e9), (KIMI_K2, 64, 1026e9)])
def test_deepseek_v3_and_kimi_k2(published: dict[str, Any], num_heads: int, num_bytes: float) -> None:
    config = read(published)
    [group], experts = config.cache_groups(16, "bfloat16"), config.layers[-1].mlp
    assert group.token_bytes == 70_272 and attention_of(config).num_heads == num_heads
    assert config.num_weights + config.vocab_size * config.hidden_size == pytest.approx(num_bytes, rel=0.01)
    assert isinstance(experts, Experts) and experts.route.score is Score.SIGMOID
    assert (experts.route.groups, experts.route.kept_groups) == (published["n_group"], published["topk_group"])
    predicting = [name for name in config.ignored if name.startswith("model.layers.")]
    assert predicting == ["model.layers.61."] * published["num_nextn_predict_layers"]


def test_an_expanded_pair_of_tokens_takes_fewer_products_than_a_latent_one() -> None:
    latent = attention_of(read(V2_LITE))
    assert 2 * latent.pair_products == 16 * (192 + 128) < 16 * (576 + 512)


@pytest.mark.parametrize(
    ("published", "message"),
    [
        (V3 | {"quantization_config": FP8 | {"fmt": "e5m2"}}, "fmt = 'e5m2' is not supported"),
        (V2_LITE | {"norm_topk_prob": True}, "norm_topk_prob = True is not supported"),
        (V2_LITE | {"topk_method": "noaux_tc"}, "topk_method = 'noaux_tc' is not supported"),
        (V3 | {"scoring_func": "softmax"}, "scoring_func = 'softmax' is not supported"),
        (V3 | {"n_group": 7}, "256 experts in n_group = 7 groups"),
        (V3 | {"topk_group": 1, "num_experts_per_tok": 33}, "topk_group = 1 have num_experts_per_tok = 33"),
        (V3 | {"num_key_value_heads": 8}, "num_key_value_heads = 8 is not supported, only 128"),
        (V3 | {"rope_interleave": False}, "rope_interleave = False is not supported"),
        (V3 | {"first_k_dense_replace": True}, "first_k_dense_replace = True, 0 to 61 is needed"),
        (V3 | {"first_k_dense_replace": 62}, "first_k_dense_replace = 62, 0 to 61 is needed"),
        (V3 | {"qk_rope_head_dim": 63}, "qk_rope_head_dim = 63, an even number"),
        (V3 | {"model_type": "deepseek_v32"}, "'deepseek_v32' is not supported, because it needs keys chosen by"),
        ({"model_type": "deepseek_v4"}, "because it needs compressed keys"),
    ],
)
def test_others_are_refused_by_name(published: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read(published)
