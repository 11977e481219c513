"""SmolLM3 (3B), dense: every fourth layer leaves queries and keys as they are, without RoPE."""

from dataclasses import replace

from common.base.errors import ModelError
from common.base.json_file import JsonObject
from common.models.config import DecoderConfig, Layer
from common.models.dense import dense_config
from common.models.rope_scaling import yarn_rope
from common.models.settings import MAX_LAYERS, Settings
from common.models.sizes.attention import Attention
from common.models.sizes.rope import Rope

LEFT_OUT: JsonObject = {"rope_theta": 2_000_000.0, "tie_word_embeddings": True}
"""Settings that config.json may leave out."""
NO_ROPE = Rope((), is_leading=False)
"""No dimension turns, and heads keep their order."""


def decoder_config(settings: Settings) -> DecoderConfig:
    """Return the config of the forward pass; raises ModelError for an unsupported setting."""
    settings = settings.completed(LEFT_OUT)
    settings.refuse("use_sliding_window", False)
    config = dense_config(settings, default_eps=1e-6, rotation=yarn_rope)
    return replace(config, layers=tuple(map(_layer, config.layers, _rotations(settings, len(config.layers)))))


def _rotations(settings: Settings, count: int) -> list[int]:
    """Return 1 for each layer that rotates, else 0: as listed, or 0 at the end of each interval."""
    interval = settings.count("no_rope_layer_interval", MAX_LAYERS, 4)
    listed = settings.values.get("no_rope_layers", [int(number % interval > 0) for number in range(1, count + 1)])
    if not isinstance(listed, list) or len(listed) != count or any(each not in (0, 1) for each in listed):
        raise ModelError(f"{settings.where}: no_rope_layers = {listed!r:.200}, {count} of 0 and 1 are needed")
    return listed


def _layer(layer: Layer, rotates: int) -> Layer:
    """Return the layer, without RoPE unless it rotates."""
    assert isinstance(layer.mixer, Attention)
    return layer if rotates else replace(layer, mixer=replace(layer.mixer, rope=NO_ROPE))
