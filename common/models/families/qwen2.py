"""Qwen2 and Qwen2.5, dense: biases on Q, K and V."""

from common.models.config import DecoderConfig
from common.models.dense import dense_config
from common.models.rope_scaling import yarn_rope
from common.models.settings import Settings


def decoder_config(settings: Settings) -> DecoderConfig:
    """Return the config of the forward pass; raises ModelError for an unsupported setting."""
    settings.refuse("use_sliding_window", False)
    return dense_config(settings, default_eps=1e-6, qkv_bias=True, rotation=yarn_rope)
