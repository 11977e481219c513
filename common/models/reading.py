"""Reading of a model's config: the family is the module named by `model_type`. Needs no torch."""

import pkgutil
from dataclasses import replace
from importlib import import_module
from pathlib import Path

from common.base.errors import ConfigError, ModelError
from common.checkpoint.gguf.config import ROPE_FACTORS, config_of, rope_factors
from common.checkpoint.gguf.model_file import is_gguf, read_gguf
from common.models.config import DecoderConfig, Layer
from common.models.quantization.configs.reading import read_quantization
from common.models.settings import Settings
from common.models.sizes.attention import Attention

PLAIN = "plain"
"""Choice of `model.quantization` by which a quantized checkpoint's matrices are made plain."""
AS_STORED = "auto"
"""Choice by which products are held as the checkpoint has them, where they are as fast so as in 16 bits."""
PACKED = "packed"
"""Choice by which all are that can be."""
KEEP = "keep"
"""Choice of `model.head` by which the matrix of logits is held as the model has it."""
FAMILIES = "common.models.families"
WRAPPERS: dict[str, tuple[str, ...]] = {
    "gemma3": ("gemma3_text",),
    "gemma4": ("gemma4_text",),
    "gemma4_unified": ("gemma4_unified_text",),
    "kimi_k25": ("kimi_k2", "deepseek_v3"),
    "mistral3": ("mistral", "ministral3", "mistral4"),
    "qwen3_5": ("qwen3_5_text",),
    "qwen3_5_moe": ("qwen3_5_moe_text",),
}
"""Models with eyes or ears: values of `model_type`, and of the text models inside, the usual one first."""
SENSES = (
    "vision_tower.",
    "mm_projector.",
    "multi_modal_projector.",
    "model.visual.",
    "model.vision_tower.",
    "model.multi_modal_projector.",
    "model.audio_tower.",
    "model.vision_embedder.",
    "model.embed_vision.",
    "model.embed_audio.",
)
"""Beginnings of names of tensors that text does not need."""
KEEP_PACKED = ("gpt_oss",)
"""Values of `model_type` whose families read the format of packed weights themselves."""
LACKING = {
    "deepseek_v32": "keys chosen by an indexer",
    "deepseek_v4": "compressed keys chosen by an indexer, experts chosen by token, and a residual stream of four rows",
}
"""What known values of `model_type` need beyond what there is."""


def architectures() -> list[str]:
    """Return the supported values of `model_type`, sorted; each names a module or a wrapper."""
    return sorted([module.name for module in pkgutil.iter_modules(import_module(FAMILIES).__path__)] + [*WRAPPERS])


def read_config(path: Path, quantization: str = AS_STORED, head: str = KEEP) -> DecoderConfig:
    """Return the decoder's config of a directory or a GGUF file; raises ModelError for an unsupported model.

    Args:
        quantization: scheme in which products are held, AS_STORED, PACKED or PLAIN.
        head: scheme in which the matrix of logits is held, or KEEP.
    """
    config = _with_products(path, quantization)
    return config if head == KEEP else replace(config, head=head)


def _with_products(path: Path, quantization: str) -> DecoderConfig:
    if is_gguf(path):
        config, where, is_packed = _gguf_config(path), str(path), False
    else:
        settings = Settings.read(path)
        config, where = decoder_config(settings), settings.where
        is_packed = config.quantization is None and settings.is_quantized
    if quantization in (AS_STORED, PACKED):
        return config
    if is_packed:
        raise ModelError(
            f"{where}: model.quantization = {quantization!r} is for matrices in 16 bits, or that are made so, "
            f"and this model keeps its own format; set {AS_STORED}, or serve the checkpoint in 16 bits"
        )
    return replace(config, scheme="" if quantization == PLAIN else quantization)


def decoder_config(settings: Settings) -> DecoderConfig:
    """Return the decoder's config from settings already read; raises ModelError for an unsupported model."""
    model_type = settings.values.get("model_type")
    known = architectures()
    if lacking := LACKING.get(str(model_type)):
        raise ModelError(f"{settings.where}: model_type = {model_type!r} is not supported, because it needs {lacking}")
    if model_type not in known:
        raise ModelError(f"{settings.where}: model_type = {model_type!r:.80}; supported: {', '.join(known)}")
    if model_type in WRAPPERS:
        return _inner_config(settings.text(), model_type)
    return _family_config(settings, model_type)


def _family_config(settings: Settings, model_type: str) -> DecoderConfig:
    config: DecoderConfig = import_module(f"{FAMILIES}.{model_type}").decoder_config(settings)
    if model_type in KEEP_PACKED:
        return config
    return replace(config, quantization=read_quantization(settings.values, settings.where))


def _inner_config(text: Settings, wrapper: str) -> DecoderConfig:
    """Return the config of the text model inside a wrapper."""
    texts = WRAPPERS[wrapper]
    inner = text.values.get("model_type") or texts[0]
    if inner not in texts:
        raise ModelError(
            f"{text.where}: model_type = {inner!r:.80} is not supported inside {wrapper}, only {' or '.join(texts)}; "
            "serve another checkpoint"
        )
    config = _family_config(text, inner)
    return replace(config, source=replace(config.source, ignored=(*config.source.ignored, *SENSES)))


def _gguf_config(path: Path) -> DecoderConfig:
    """Return the decoder's config of a GGUF file, its rotary frequencies divided by the file's factors.

    Files of Llama 3.1 and later have factors in a tensor, in place of a scaling in the metadata.
    """
    try:
        model = read_gguf(path)
        settings, factors = Settings(config_of(model), str(path)), rope_factors(model)
    except ConfigError as error:
        raise ModelError(str(error)) from None
    config = decoder_config(settings)
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
