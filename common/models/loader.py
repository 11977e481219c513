"""Load a model onto a device, from a directory or a GGUF file."""

import logging
from collections import Counter
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from common.base.dtypes import DTYPES
from common.base.errors import ConfigError
from common.checkpoint.gguf.model_file import is_gguf
from common.models.base import Model, ModelConfig
from common.models.config import DecoderConfig, cached_dtype
from common.models.decoder import Decoder
from common.models.loading.checkpoint import stored_tensors
from common.models.loading.gguf_weights import load_gguf_weights
from common.models.loading.upload import Progress
from common.models.loading.weights import Loading, WeightsLayout, WeightsMemory, load_weights, weights_layout
from common.models.quantization.cache_scales import cache_scales
from common.models.sizes.attention import Attention
from common.models.sizes.quantized import is_quantized
from common.settings.config import ModelSection
from common.wire.values.kv_layout import E4M3

logger = logging.getLogger(__name__)


def resolve_dtype(choice: str, config: ModelConfig, device: torch.device) -> str:
    """Resolve `auto` to the checkpoint's half precision on a GPU (else bfloat16), and to float32 on a CPU.

    Raises ConfigError for float16 where a model's activations exceed it.
    """
    if choice == "float16" and config.exceeds_float16:
        raise ConfigError(
            "model.dtype = 'float16': this model's activations exceed 65504, float16's largest number; "
            "set bfloat16, float32 or auto"
        )
    if choice != "auto":
        return choice
    if device.type == "cpu":
        return "float32"
    return "float16" if config.dtype == "float16" and not config.exceeds_float16 else "bfloat16"


def resolve_kv_dtype(choice: str, config: ModelConfig, dtype: str, device: torch.device) -> str:
    """Return the dtype of keys and values of a model served in `dtype`.

    Raises ConfigError for e4m3 where the cache holds latents, from which keys and values are computed. Also for a model
    in float32 on a GPU, where keys of e4m3 are multiplied in 16 bits.
    """
    kv_dtype = cached_dtype(choice, dtype, has_latents=bool(config.latents))
    if kv_dtype == E4M3 and device.type == "cuda" and dtype == "float32":
        raise ConfigError(
            "kv.dtype = 'fp8': on a GPU this is for models in 16 bits, and model.dtype is 'float32'; set one to auto"
        )
    return kv_dtype


def with_cache_scales(config: DecoderConfig, model_dir: Path) -> DecoderConfig:
    """Return the config with the scales of keys and values that a quantized checkpoint has; 1 without."""
    if config.quantization is None:
        return config
    attention = [number for number, layer in enumerate(config.layers) if isinstance(layer.mixer, Attention)]
    scales, layers = cache_scales(stored_tensors(model_dir), attention), list(config.layers)
    for number, pair in scales.items():
        mixer = layers[number].mixer
        assert isinstance(mixer, Attention)
        layers[number] = replace(layers[number], mixer=replace(mixer, kv_scales=pair))
    if scales:
        least, most = min(map(min, scales.values())), max(map(max, scales.values()))
        logger.info("keys and values in fp8 have scales of the checkpoint, from %g to %g", least, most)
    return replace(config, layers=tuple(layers))


def resolve_max_len(section: ModelSection, config: ModelConfig) -> int:
    """Return the longest sequence served, in tokens; raises ConfigError if the model has fewer positions."""
    if section.max_len > config.max_positions:
        raise ConfigError(f"model.max_len = {section.max_len}: the model has {config.max_positions} positions")
    return section.max_len or config.max_positions


def model_bytes(config: ModelConfig, dtype: str) -> int:
    """Return the size of the weights in one region, alignment included."""
    return weights_layout(config.stacks(), DTYPES[dtype]).num_bytes


def load_model(
    path: Path, config: DecoderConfig, *, max_len: int, dtype: str, memory: WeightsMemory
) -> tuple[Model, Loading]:
    """Begin to read the weights of `config` into `memory`: the model is complete after `Loading.wait`."""
    layout = weights_layout(config.stacks(), DTYPES[dtype])
    if config.scheme or config.held_as:
        logger.info("%s", _described(config, layout, dtype))
    if config.head:
        logger.info("the matrix of logits is quantized to %s", config.head)

    def fill(region: Tensor, progress: Progress) -> Loading:
        if is_gguf(path):
            return load_gguf_weights(path, layout, region, head_dim=config.heads[0].head_dim, progress=progress)
        return load_weights(
            path, layout, region, ignored=config.ignored, progress=progress, quantization=config.quantization
        )

    region, loading = memory.begin(layout, fill)
    return Decoder(config, layout.tensors(region), max_len), loading


def _described(config: DecoderConfig, layout: WeightsLayout, dtype: str) -> str:
    """Return a line about matrices in codes, and the bytes of all weights with them and without."""
    told = config.held_as
    if config.scheme:
        forms = Counter(stack.form.label for stack in layout.stacks.values() if stack.form and is_quantized(stack))
        held = ", ".join(f"{count} in {label}" for label, count in forms.items())
        told = f"products are quantized to {config.scheme}: {held}"
    plain_gb = model_bytes(replace(config, scheme="", kept=()), dtype) / 1e9
    return f"{told}; {layout.num_bytes / 1e9:.2f} GB of weights, {plain_gb:.2f} in {dtype}"
