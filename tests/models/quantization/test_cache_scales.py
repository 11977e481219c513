"""Scales of keys and values by the names that checkpoints have, and what is no scale."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from common.base.errors import ModelError
from common.models.config import DecoderConfig
from common.models.loader import with_cache_scales
from common.models.reading import read_config
from common.models.sizes.attention import Attention
from tests.models.quantization.test_loading import add

E4M3 = "float8_e4m3fn"
NAMES = [
    ("self_attn.k_scale", "self_attn.v_scale"),
    ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
    ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"),
    ("self_attn.attn.k_scale", "self_attn.attn.v_scale"),
]


def scales_of(config: DecoderConfig) -> list[tuple[float, float]]:
    return [layer.mixer.kv_scales for layer in config.layers if isinstance(layer.mixer, Attention)]


def digest_of(config: DecoderConfig, dtype: str = E4M3) -> str:
    [group] = config.cache_groups(16, dtype)
    return group.scales


def read(directory: Path) -> DecoderConfig:
    return with_cache_scales(read_config(directory), directory)


@pytest.mark.parametrize(("k_name", "v_name"), NAMES)
def test_scales_are_found_by_each_name(k_name: str, v_name: str, packed: Callable[[str], Path]) -> None:
    directory = packed("fp8-modelopt")
    plain = read(directory)
    assert set(scales_of(plain)) == {(1.0, 1.0)} and digest_of(plain) == ""
    expected = [(0.5 + layer, 0.25) for layer in range(len(plain.layers))]
    for layer, (k_scale, v_scale) in enumerate(expected):
        prefix = f"model.layers.{layer}."
        scales = {prefix + k_name: torch.tensor([k_scale]), prefix + v_name: torch.tensor(v_scale).bfloat16()}
        add(directory, **scales)
    found = read(directory)
    assert scales_of(found) == expected
    assert digest_of(found) != "" and digest_of(found, "bfloat16") == ""
    assert found == plain, "layers of unequal scales run equal kernels"


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (torch.tensor(0.0), "k_scale is 0.0, which is no scale"),
        (torch.tensor(-1.0), "k_scale is -1.0, which is no scale"),
        (torch.tensor(float("nan")), "k_scale is nan, which is no scale"),
        (torch.ones(2), r"k_scale is \[2\], supported is a scale for all heads"),
        (torch.tensor(2.0), r"layers\.0\.self_attn\.v_scale is missing"),
    ],
)
def test_what_is_no_scale_is_refused(scale: torch.Tensor, message: str, packed: Callable[[str], Path]) -> None:
    directory = packed("fp8-modelopt")
    add(directory, model__layers__0__self_attn__k_scale=scale)
    with pytest.raises(ModelError, match=message):
        read(directory)


def test_one_scale_is_of_both(packed: Callable[[str], Path]) -> None:
    directory = packed("fp8-modelopt")
    for layer in range(len(read(directory).layers)):
        add(directory, **{f"model.layers.{layer}.self_attn.kv_scale": torch.tensor(0.125)})
    assert set(scales_of(read(directory))) == {(0.125, 0.125)}
