"""Kimi K2: DeepSeek-V3 with more experts and fewer heads."""

from common.models.config import DecoderConfig
from common.models.families import deepseek_v3
from common.models.settings import Settings


def decoder_config(settings: Settings) -> DecoderConfig:
    """Return the config of the forward pass; raises ModelError for an unsupported setting."""
    return deepseek_v3.decoder_config(settings)
