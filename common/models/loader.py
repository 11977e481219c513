"""Load a model directory onto a device; the architecture is the module named by `model_type`."""

import importlib
import pkgutil
from pathlib import Path

import torch
from torch import Tensor

import common.models
from common.base.dtypes import DTYPES
from common.base.errors import ConfigError, ModelError
from common.models.decoder import Decoder, DecoderConfig, weight_pieces
from common.models.settings import Settings
from common.models.upload import Progress
from common.models.weights import Loading, WeightsMemory, load_weights, weights_layout
from common.settings.config import ModelSection

_SHARED = {"decoder", "loader", "settings", "upload", "weights"}


def architectures() -> list[str]:
    """Return the supported values of `model_type`, sorted; each names a module."""
    return sorted(module.name for module in pkgutil.iter_modules(common.models.__path__) if module.name not in _SHARED)


def read_config(model_dir: Path) -> DecoderConfig:
    """Return the decoder's config from config.json; raises ModelError for an unsupported model."""
    return decoder_config(Settings.read(model_dir))


def decoder_config(settings: Settings) -> DecoderConfig:
    """Return the decoder's config from settings already read; raises ModelError for an unsupported model."""
    model_type = settings.values.get("model_type")
    known = architectures()
    if model_type not in known:
        raise ModelError(f"{settings.where}: model_type = {model_type!r:.80}; supported: {', '.join(known)}")
    config: DecoderConfig = importlib.import_module(f"common.models.{model_type}").decoder_config(settings)
    if config.num_q_heads % config.num_kv_heads:
        raise ModelError(
            f"{settings.where}: {config.num_q_heads} query heads over {config.num_kv_heads} KV heads, "
            "a multiple of them is needed; do config.json and the weights belong together?"
        )
    return config


def resolve_dtype(choice: str, config: DecoderConfig, device: torch.device) -> str:
    """Resolve `auto` to the checkpoint's half precision on a GPU (else bfloat16), and to float32 on a CPU."""
    if choice != "auto":
        return choice
    if device.type == "cpu":
        return "float32"
    return config.dtype if config.dtype in ("bfloat16", "float16") else "bfloat16"


def resolve_max_len(section: ModelSection, config: DecoderConfig) -> int:
    """Return the longest sequence served, in tokens; raises ConfigError if the model has fewer positions."""
    if section.max_len > config.max_positions:
        raise ConfigError(f"model.max_len = {section.max_len}: the model has {config.max_positions} positions")
    return section.max_len or config.max_positions


def model_bytes(config: DecoderConfig, dtype: str) -> int:
    """Return the size of the weights in one region, alignment included."""
    return weights_layout(weight_pieces(config), DTYPES[dtype]).num_bytes


def load_model(
    model_dir: Path, config: DecoderConfig, *, max_len: int, dtype: str, memory: WeightsMemory
) -> tuple[Decoder, Loading]:
    """Begin to read the weights of `config` into `memory`: the model is complete after `Loading.wait`."""
    layout = weights_layout(weight_pieces(config), DTYPES[dtype])

    def fill(region: Tensor, progress: Progress) -> Loading:
        return load_weights(model_dir, layout, region, tied_embeddings=config.tied_embeddings, progress=progress)

    region, loading = memory.begin(layout, fill)
    return Decoder(config, layout.tensors(region), max_len), loading
