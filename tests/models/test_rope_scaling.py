"""Rotary settings in every spelling, and frequencies of stretched contexts, against transformers'."""

from typing import Any

import pytest
import torch
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from common.base.errors import ModelError
from common.models.families import llama
from common.models.gemma import rope_of
from common.models.rope_scaling import read_growth, read_yarn, yarn_rope
from common.models.settings import FULL, Settings
from tests.support.checkpoints import LLAMA3_ROPE, SHAPE

GPT_OSS = {
    "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
MINISTRAL_3 = {
    "rope_theta": 1e6, "factor": 16.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 16384, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
DEEPSEEK_V2_LITE = {
    "rope_theta": 10000, "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
KIMI_K2 = {
    "rope_theta": 50000.0, "factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
QWEN = {"rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768}
FEW_KEYS = {"factor": 2.5}
FIXED = {"rope_theta": 10000.0, "factor": 8.0, "attention_factor": 1.5, "mscale": 0.5, "mscale_all_dim": 1.0}
UNEQUAL = {"rope_theta": 10000.0, "factor": 8.0, "mscale": 0.5, "mscale_all_dim": 1.0}


@pytest.mark.parametrize(
    ("scaling", "dim", "factor"),
    [
        (GPT_OSS, 64, 1.3465736),
        (MINISTRAL_3, 128, 1.0),
        (DEEPSEEK_V2_LITE, 64, 1.0),
        (KIMI_K2, 64, 1.0),
        (QWEN, 128, 1.1386294),
        (FEW_KEYS, 32, 1.0916291),
        (FIXED, 64, 1.5),
        (UNEQUAL, 64, 1.1039721 / 1.2079442),
        (DEEPSEEK_V2_LITE | {"original_max_position_embeddings": 32}, 8, 1.0),
        (GPT_OSS | {"original_max_position_embeddings": 64}, 32, 1.3465736),
    ],
)
@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_yarn_is_that_of_transformers(scaling: dict[str, Any], dim: int, factor: float, key: str) -> None:
    values = {"max_position_embeddings": 4096, "rope_scaling": {key: "yarn", **scaling}}
    rope = yarn_rope(Settings(values, "config.json"), dim)
    table = {"rope_type": "yarn", "original_max_position_embeddings": 4096, "rope_theta": 10000.0, **scaling}
    theirs = PreTrainedConfig(head_dim=dim, hidden_size=4 * dim, num_attention_heads=4, max_position_embeddings=4096)
    theirs.rope_parameters = table
    frequencies, their_factor = ROPE_INIT_FUNCTIONS["yarn"](theirs, torch.device("cpu"))
    torch.testing.assert_close(torch.tensor(rope.inverse_frequencies), frequencies, rtol=1e-6, atol=0.0)
    assert rope.factor == pytest.approx(their_factor) == pytest.approx(factor)


def test_scores_are_sharpened_by_the_square() -> None:
    settings = Settings({}, "config.json")
    assert read_yarn(settings, DEEPSEEK_V2_LITE).score_factor == pytest.approx(1.2608038**2)
    assert read_yarn(settings, GPT_OSS).score_factor == 1.0


def test_queries_grow_where_a_rate_is_named() -> None:
    settings = Settings({}, "config.json")
    assert read_growth(settings, MINISTRAL_3) == (0.1, 16384)
    assert read_growth(settings, QWEN) is None


LLAMA = {**SHAPE, "model_type": "llama", "rope_theta": LLAMA3_ROPE["rope_theta"], "rope_scaling": LLAMA3_ROPE}
PLAIN = {"rope_type": "default", "rope_theta": LLAMA3_ROPE["rope_theta"]}


@pytest.mark.parametrize("beside", [PLAIN, LLAMA3_ROPE, {"type": "default"}])
def test_a_scaling_prevails_over_a_plain_table_and_over_its_own_copy(beside: dict[str, Any]) -> None:
    alone = llama.decoder_config(Settings(LLAMA, "config.json"))
    assert llama.decoder_config(Settings(LLAMA | {"rope_parameters": beside}, "config.json")) == alone


@pytest.mark.parametrize(
    ("scaling", "parameters", "message"),
    [
        (LLAMA3_ROPE, LLAMA3_ROPE | {"factor": 4.0}, r"factor = 8\.0 of rope_scaling, but 4\.0 of rope_parameters"),
        (PLAIN, LLAMA3_ROPE, "rope_type = 'default' of rope_scaling, but 'llama3' of rope_parameters; keep one"),
        ({"rope_type": "default"}, {"rope_theta": 5e5}, r"rope_theta = 10000\.0 of rope_scaling, but 500000\.0"),
        ([1], PLAIN, r"rope_scaling = \[1\], an object is needed"),
        (None, {FULL: LLAMA3_ROPE}, "full_attention = .* is not supported, only None"),
    ],
)
def test_tables_that_contradict_each_other_are_refused(scaling: object, parameters: object, message: str) -> None:
    both = LLAMA | {"rope_scaling": scaling, "rope_parameters": parameters}
    with pytest.raises(ModelError, match=message):
        llama.decoder_config(Settings(both, "config.json"))


@pytest.mark.parametrize("table", [{"partial_rotary_factor": 0.25, "factor": 8.0}, {"partial_rotary_factor": 0.25}])
def test_proportional_rotation_is_that_of_transformers(table: dict[str, Any]) -> None:
    table = {"rope_type": "proportional", "rope_theta": 1e6, **table}
    rope = rope_of(Settings({"rope_parameters": {FULL: table}}, "config.json"), FULL, 64)
    theirs = PreTrainedConfig(head_dim=64, hidden_size=256, num_attention_heads=4)
    theirs.rope_parameters = table
    frequencies, _ = ROPE_INIT_FUNCTIONS["proportional"](theirs, torch.device("cpu"))
    ours = torch.zeros(32)
    ours[: len(rope.inverse_frequencies)] = torch.tensor(rope.inverse_frequencies)
    torch.testing.assert_close(ours, frequencies, rtol=1e-6, atol=0.0)
