"""Qwen3.5 and Qwen3.6 with experts and with eyes: the text model inside."""

from common.models.config import DecoderConfig
from common.models.families import qwen3_5_moe_text
from common.models.settings import Settings


def decoder_config(settings: Settings) -> DecoderConfig:
    """Return the config of the text model; raises ModelError for an unsupported setting."""
    return qwen3_5_moe_text.decoder_config(settings.text())
