"""Llama 3, 3.1, 3.2 and 3.3, with the RoPE scaling introduced by 3.1."""

import math

from common.base.errors import ModelError
from common.base.json_file import JsonObject
from common.base.rotary import is_positive
from common.models.config import DecoderConfig
from common.models.dense import dense_config
from common.models.settings import Settings
from common.models.sizes.rope import Rope, inverse_frequencies

FACTORS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def decoder_config(settings: Settings) -> DecoderConfig:
    """Return the config of the forward pass; raises ModelError for an unsupported setting."""
    settings.refuse("sliding_window", None)
    return dense_config(settings, default_eps=1e-5, rotation=_rope)


def _rope(settings: Settings, dim: int) -> Rope:
    base, scaling = settings.rope()
    return Rope(tuple(_scaled(inverse_frequencies(base, dim), scaling, settings.where)))


def _scaled(frequencies: list[float], scaling: JsonObject, where: str) -> list[float]:
    """Scale by Llama 3.1's rule: stretch long wavelengths by `factor`, keep short ones, blend those between."""
    kind = scaling.get("rope_type", "default")
    if kind == "default":
        return frequencies
    if kind != "llama3":
        raise ModelError(f"{where}: RoPE scaling {kind!r:.80} is not supported, only 'llama3' and 'default'")
    for key in FACTORS:
        if not is_positive(scaling.get(key)):
            raise ModelError(f"{where}: {key} = {scaling.get(key)!r:.80} of RoPE scaling, a positive number is needed")
    factor, low, high, context = (float(scaling[key]) for key in FACTORS)
    if low >= high:
        raise ModelError(
            f"{where}: low_freq_factor = {low:g} of RoPE scaling, less than high_freq_factor {high:g} is needed"
        )
    return [_scaled_one(frequency, factor, low, high, context) for frequency in frequencies]


def _scaled_one(frequency: float, factor: float, low: float, high: float, context: float) -> float:
    wavelength = 2 * math.pi / frequency
    if wavelength < context / high:
        return frequency
    if wavelength > context / low:
        return frequency / factor
    blend = (context / wavelength - low) / (high - low)
    return (1 - blend) * frequency / factor + blend * frequency
