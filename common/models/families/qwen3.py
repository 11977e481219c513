"""Qwen3, dense (0.6B to 32B): query and key heads are normed before the rotation."""

from common.models.config import DecoderConfig
from common.models.dense import dense_config
from common.models.rope_scaling import yarn_rope
from common.models.settings import Settings


def decoder_config(settings: Settings) -> DecoderConfig:
    """Return the config of the forward pass; raises ModelError for an unsupported setting."""
    settings.refuse("use_sliding_window", False)
    return dense_config(settings, default_eps=1e-6, qk_norm=True, rotation=yarn_rope)
