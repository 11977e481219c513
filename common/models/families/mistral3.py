"""Mistral Small 3.1 to 4, Ministral 3 and Devstral Small 2, with eyes: the text model inside."""

from dataclasses import replace

from common.models.config import DecoderConfig
from common.models.families import ministral3, mistral, mistral4
from common.models.settings import Settings

IGNORED = ("vision_tower.", "multi_modal_projector.")
OTHERS = {"ministral3": ministral3.decoder_config, "mistral4": mistral4.decoder_config}
"""Families of text models besides `mistral`."""


def decoder_config(settings: Settings) -> DecoderConfig:
    """Return the config of the text model; raises ModelError for an unsupported setting."""
    text = settings.text()
    config = _text_config(text)
    return replace(config, source=replace(config.source, ignored=(*config.source.ignored, *IGNORED)))


def _text_config(text: Settings) -> DecoderConfig:
    if other := OTHERS.get(str(text.values.get("model_type"))):
        return other(text)
    text.refuse("model_type", "mistral")
    return mistral.decoder_config(text)
