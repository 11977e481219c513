"""Gemma 3 with eyes: the text model inside."""

from common.models.config import DecoderConfig
from common.models.families import gemma3_text
from common.models.settings import Settings


def decoder_config(settings: Settings) -> DecoderConfig:
    """Return the config of the text model; raises ModelError for an unsupported setting."""
    text = settings.text()
    text.refuse("model_type", "gemma3_text")
    return gemma3_text.decoder_config(text)
