"""Gemma 4 12B: the equations of the other dense models."""

from common.models.config import DecoderConfig
from common.models.families import gemma4_text
from common.models.settings import Settings


def decoder_config(settings: Settings) -> DecoderConfig:
    """Return the config of the forward pass; raises ModelError for an unsupported setting."""
    return gemma4_text.decoder_config(settings)
