"""Qwen3, dense (0.6B to 32B): query and key heads are normed before the rotation."""

from common.base.errors import ModelError
from common.base.json_file import JsonObject
from common.models.config import DecoderConfig
from common.models.dense import dense_config
from common.models.settings import Settings


def decoder_config(settings: Settings) -> DecoderConfig:
    """Return the config of the forward pass; raises ModelError for an unsupported setting."""
    settings.refuse("use_sliding_window", False)

    def unscaled(frequencies: list[float], scaling: JsonObject) -> list[float]:
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind != "default":
            raise ModelError(f"{settings.where}: RoPE scaling {kind!r:.80} is not supported for qwen3, remove it")
        return frequencies

    return dense_config(settings, default_eps=1e-6, qk_norm=True, scale=unscaled)
