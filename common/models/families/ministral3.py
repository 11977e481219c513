"""Ministral 3 and Devstral Small 2: YaRN, and queries that grow with their position."""

from dataclasses import replace

from common.models.config import DecoderConfig
from common.models.dense import dense_config
from common.models.rope_scaling import read_growth, yarn_rope
from common.models.settings import Settings
from common.models.sizes.rope import Rope


def decoder_config(settings: Settings) -> DecoderConfig:
    """Return the config of the forward pass; raises ModelError for an unsupported setting."""
    settings.require_rope_table()
    return dense_config(settings, default_eps=1e-5, rotation=_rope, window=settings.window())


def _rope(settings: Settings, dim: int) -> Rope:
    _, scaling = settings.rope()
    return replace(yarn_rope(settings, dim), growth=read_growth(settings, scaling))
