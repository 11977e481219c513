"""Scales of keys and values in the cache, as checkpoints of several tools name them."""

import math
from collections.abc import Iterable, Mapping

from safetensors import safe_open

from common.base.errors import ModelError
from common.models.quantization.stored import OF_CACHE, StoredTensor

_NAMES = ("{}_scale", "{}_proj.{}_scale", "{}_proj.output_scale", "attn.{}_scale", "kv_scale")
"""Names behind `self_attn.`, of keys (k) or values (v); the last is of both."""


def cache_scales(stored: Mapping[str, StoredTensor], layers: Iterable[int]) -> dict[int, tuple[float, float]]:
    """Return the scales of keys and of values of layers with attention; {} if the checkpoint has none.

    Raises ModelError for a layer without scales beside others with scales, for a scale of single heads, and for
    numbers that no scale can be.
    """
    if not any(OF_CACHE.search(name) for name in stored):
        return {}
    return {layer: (_scale(stored, layer, "k"), _scale(stored, layer, "v")) for layer in layers}


def _scale(stored: Mapping[str, StoredTensor], layer: int, letter: str) -> float:
    prefix = f"model.layers.{layer}.self_attn."
    names = [prefix + name.replace("{}", letter) for name in _NAMES]
    held = [stored[name] for name in names if name in stored]
    if not held:
        raise ModelError(
            f"{names[0]} is missing, and other layers have scales of keys and values; fetch the model again, or set "
            "kv.dtype to auto"
        )
    tensor = held[0]
    if math.prod(tensor.shape) != 1:
        raise ModelError(
            f"{tensor.path}: {tensor.name} is {list(tensor.shape)}, supported is a scale for all heads; set kv.dtype "
            "to auto"
        )
    with safe_open(tensor.path, framework="pt") as handle:
        scale = float(handle.get_tensor(tensor.name))
    if not (math.isfinite(scale) and scale > 0):
        raise ModelError(f"{tensor.path}: {tensor.name} is {scale}, which is no scale; set kv.dtype to auto")
    return scale
