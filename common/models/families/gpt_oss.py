"""gpt-oss (20B, 120B): every other layer sees a window, heads have sinks, and experts are in MXFP4 or 16 bits."""

from common.base import mxfp4
from common.base.activation import SWIGLU_ALPHA, SWIGLU_LIMIT, Activation
from common.base.json_file import JsonObject
from common.base.routing import Route
from common.models.config import DecoderConfig, Layer
from common.models.dense import read_heads
from common.models.rope_scaling import yarn_rope
from common.models.settings import FULL, MAX_EXPERTS, MAX_LAYERS, MAX_WIDTH, SLIDING, Settings
from common.models.sizes.attention import Attention
from common.models.sizes.experts import ExpertNames, Experts
from common.models.sizes.stacks import Source
from common.settings.config import MAX_TOKENS

NAMES = ExpertNames(router="mlp.router")
LEFT_OUT: JsonObject = {
    "head_dim": 64,
    "sliding_window": 128,
    "rope_theta": 150_000.0,
    "max_position_embeddings": 131_072,
}
"""Settings that config.json may leave out."""


def decoder_config(settings: Settings) -> DecoderConfig:
    """Return the config of the forward pass; raises ModelError for an unsupported setting."""
    settings = settings.completed(LEFT_OUT)
    for key, wanted in (("hidden_act", "silu"), ("swiglu_limit", SWIGLU_LIMIT), ("swiglu_alpha", SWIGLU_ALPHA)):
        settings.refuse(key, wanted)
    settings.refuse("attention_bias", True)
    settings.require_rope_table()
    experts, window = _experts(settings), settings.count("sliding_window", MAX_TOKENS)
    layers = {kind: Layer(_attention(settings, size), experts) for kind, size in ((FULL, 0), (SLIDING, window))}
    return DecoderConfig(
        vocab_size=settings.count("vocab_size", MAX_WIDTH),
        norm_eps=settings.positive_float("rms_norm_eps", 1e-5),
        max_positions=settings.max_positions(),
        tied_embeddings=settings.flag("tie_word_embeddings"),
        dtype=settings.dtype(),
        layers=tuple(layers[kind] for kind in _kinds(settings)),
        source=Source(settings.count("hidden_size", MAX_WIDTH)),
        exceeds_float16=True,
    )


def _kinds(settings: Settings) -> list[str]:
    """Return the kind of each layer: as listed, or a window for the first, all for the second, in turn."""
    count = settings.count("num_hidden_layers", MAX_LAYERS)
    return settings.layer_kinds(FULL, SLIDING) or [(SLIDING, FULL)[number % 2] for number in range(count)]


def _attention(settings: Settings, window: int) -> Attention:
    heads = read_heads(settings)
    rope = yarn_rope(settings, heads.head_dim)
    return Attention(heads, rope, window=window, has_bias=True, has_output_bias=True, has_sinks=True)


def _experts(settings: Settings) -> Experts:
    num = settings.count("num_local_experts", MAX_EXPERTS)
    per_token = settings.count("num_experts_per_tok", num, settings.count("experts_per_token", num, 4))
    is_mxfp4 = settings.quantization("mxfp4") is not None
    if is_mxfp4:
        for key in ("hidden_size", "intermediate_size"):
            settings.multiple(key, mxfp4.GROUP, MAX_WIDTH)
    return Experts(
        num,
        settings.count("intermediate_size", MAX_WIDTH),
        Route(per_token),
        activation=Activation.CLAMPED_SWIGLU,
        has_bias=True,
        alternates=True,
        transposed=not is_mxfp4,
        is_mxfp4=is_mxfp4,
        names=NAMES,
    )
