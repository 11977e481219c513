"""Reading of a model's config: the family is the module named by `model_type`. Needs no torch."""

import pkgutil
from importlib import import_module
from pathlib import Path

from common.base.errors import ModelError
from common.models.config import DecoderConfig
from common.models.settings import Settings

FAMILIES = "common.models.families"
LACKING = {
    "deepseek_v32": "keys chosen by an indexer",
    "deepseek_v4": "compressed keys chosen by an indexer, experts chosen by token, and a residual stream of four rows",
    "kimi_k25": "experts in INT4",
}
"""What known values of `model_type` need beyond what there is."""


def architectures() -> list[str]:
    """Return the supported values of `model_type`, sorted; each names a module."""
    return sorted(module.name for module in pkgutil.iter_modules(import_module(FAMILIES).__path__))


def read_config(model_dir: Path) -> DecoderConfig:
    """Return the decoder's config from config.json; raises ModelError for an unsupported model."""
    return decoder_config(Settings.read(model_dir))


def decoder_config(settings: Settings) -> DecoderConfig:
    """Return the decoder's config from settings already read; raises ModelError for an unsupported model."""
    model_type = settings.values.get("model_type")
    known = architectures()
    if lacking := LACKING.get(str(model_type)):
        raise ModelError(f"{settings.where}: model_type = {model_type!r} is not supported, because it needs {lacking}")
    if model_type not in known:
        raise ModelError(f"{settings.where}: model_type = {model_type!r:.80}; supported: {', '.join(known)}")
    family = import_module(f"{FAMILIES}.{model_type}")
    config: DecoderConfig = family.decoder_config(settings)
    return config
