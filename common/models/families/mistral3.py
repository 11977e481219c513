"""Mistral Small 3.1 and 3.2, Ministral 3 and Devstral Small 2, with eyes: the text model inside."""

from dataclasses import replace

from common.models.config import DecoderConfig
from common.models.families import ministral3, mistral
from common.models.settings import Settings


def decoder_config(settings: Settings) -> DecoderConfig:
    """Return the config of the text model; raises ModelError for an unsupported setting."""
    text = settings.text()
    config = _text_config(text)
    return replace(config, source=replace(config.source, ignored=("vision_tower.", "multi_modal_projector.")))


def _text_config(text: Settings) -> DecoderConfig:
    if text.values.get("model_type") == "ministral3":
        return ministral3.decoder_config(text)
    text.refuse("model_type", "mistral")
    return mistral.decoder_config(text)
