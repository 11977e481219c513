"""Mistral without windows: 7B v0.2 and v0.3, Nemo, Small."""

from common.models.config import DecoderConfig
from common.models.dense import dense_config
from common.models.rope_scaling import plain_rope
from common.models.settings import Settings


def decoder_config(settings: Settings) -> DecoderConfig:
    """Return the config of the forward pass; raises ModelError for an unsupported setting."""
    settings.refuse("sliding_window", None)
    return dense_config(settings, default_eps=1e-6, rotation=plain_rope)
