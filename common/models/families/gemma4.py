"""Gemma 4 with eyes: the text model inside."""

from common.models.config import DecoderConfig
from common.models.families import gemma4_text
from common.models.settings import Settings


def decoder_config(settings: Settings) -> DecoderConfig:
    """Return the config of the text model; raises ModelError for an unsupported setting."""
    text = settings.text()
    text.refuse("model_type", "gemma4_text")
    return gemma4_text.decoder_config(text)
