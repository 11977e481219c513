"""Ministral 8B of 2024: layers that see a window between layers that see all."""

from dataclasses import replace

from common.models.config import DecoderConfig, Layer
from common.models.dense import dense_config
from common.models.rope_scaling import plain_rope
from common.models.settings import FULL, SLIDING, Settings
from common.models.sizes.attention import Attention


def decoder_config(settings: Settings) -> DecoderConfig:
    """Return the config of the forward pass; raises ModelError for an unsupported setting."""
    kinds, window = settings.layer_kinds(FULL, SLIDING), settings.window()
    alike = Settings({**settings.values, "layer_types": None}, settings.where)
    config = dense_config(alike, default_eps=1e-6, rotation=plain_rope, window=window)
    kinds = kinds or [SLIDING] * len(config.layers)
    return replace(config, layers=tuple(map(_layer, config.layers, kinds)))


def _layer(layer: Layer, kind: str) -> Layer:
    """Return the layer with the window of its kind."""
    assert isinstance(layer.mixer, Attention)
    return layer if kind == SLIDING else replace(layer, mixer=replace(layer.mixer, window=0))
