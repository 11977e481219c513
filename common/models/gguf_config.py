"""The part of a model's config that a GGUF file keeps in a tensor: factors of rotary frequencies. Needs no torch."""

from dataclasses import replace
from pathlib import Path

from common.base.errors import ConfigError, ModelError
from common.checkpoint.gguf.config import ROPE_FACTORS, rope_factors
from common.checkpoint.gguf.model_file import read_gguf
from common.models.config import DecoderConfig, Layer
from common.models.sizes.attention import Attention


def with_rope_factors(config: DecoderConfig, path: Path) -> DecoderConfig:
    """Return the config with its rotary frequencies divided by the file's factors, if there are any.

    Files of Llama 3.1 and later have factors in place of a scaling in the metadata. Raises ModelError for another
    number of factors.
    """
    try:
        factors = rope_factors(read_gguf(path))
    except ConfigError as error:
        raise ModelError(str(error)) from None
    if factors is None:
        return config
    divided = {layer: _divided(layer, factors, path) for layer in set(config.layers)}
    return replace(config, layers=tuple(divided[layer] for layer in config.layers))


def _divided(layer: Layer, factors: tuple[float, ...], path: Path) -> Layer:
    mixer = layer.mixer
    frequencies = mixer.rope.inverse_frequencies if isinstance(mixer, Attention) else ()
    if not isinstance(mixer, Attention) or len(frequencies) != len(factors):
        raise ModelError(
            f"{path}: {ROPE_FACTORS} has {len(factors)} factors for {len(frequencies)} rotary frequencies; "
            "serve another file of this model"
        )
    turned = tuple(frequency / factor for frequency, factor in zip(frequencies, factors, strict=True))
    return replace(layer, mixer=replace(mixer, rope=replace(mixer.rope, inverse_frequencies=turned)))
