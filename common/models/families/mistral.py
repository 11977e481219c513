"""Mistral: 7B v0.1 whose layers all have a window, and v0.2, v0.3, Nemo, Small, whose layers have none."""

from common.models.config import DecoderConfig
from common.models.dense import dense_config
from common.models.rope_scaling import plain_rope
from common.models.settings import Settings


def decoder_config(settings: Settings) -> DecoderConfig:
    """Return the config of the forward pass; raises ModelError for an unsupported setting."""
    return dense_config(settings, default_eps=1e-6, rotation=plain_rope, window=settings.window())
