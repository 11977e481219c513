"""Gemma 3: five layers that see a window, then a layer that sees all, in turn; norms before and behind each part."""

from common.base.activation import Activation
from common.models.config import DecoderConfig, Layer
from common.models.dense import read_heads
from common.models.gemma import layer_kinds, refuse_others, rope_of
from common.models.settings import FULL, MAX_WIDTH, SLIDING, Settings
from common.models.sizes.attention import Attention
from common.models.sizes.mlp import GatedMLP
from common.models.sizes.stacks import SANDWICH_NORMS, Source

LEFT_OUT = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
"""Settings that published files leave out."""


def decoder_config(settings: Settings) -> DecoderConfig:
    """Return the config of the forward pass; raises ModelError for an unsupported setting."""
    settings = settings.completed(LEFT_OUT)
    refuse_others(settings)
    settings.refuse("attn_logit_softcapping", None)
    settings.refuse("final_logit_softcapping", None)
    settings.refuse("use_bidirectional_attention", False)
    hidden_size = settings.count("hidden_size", MAX_WIDTH)
    mlp = GatedMLP(settings.count("intermediate_size", MAX_WIDTH), Activation.GELU_TANH)
    mixers = {kind: _attention(settings, kind) for kind in (FULL, SLIDING)}
    return DecoderConfig(
        vocab_size=settings.count("vocab_size", MAX_WIDTH),
        norm_eps=settings.positive_float("rms_norm_eps", 1e-6),
        max_positions=settings.max_positions(),
        tied_embeddings=settings.flag("tie_word_embeddings"),
        dtype=settings.dtype(),
        layers=tuple(Layer(mixers[kind], mlp) for kind in layer_kinds(settings)),
        source=Source(hidden_size, norm_offset=1.0, norms=SANDWICH_NORMS),
        embed_scale=hidden_size**0.5,
        exceeds_float16=True,
    )


def _attention(settings: Settings, kind: str) -> Attention:
    heads = read_heads(settings)
    return Attention(
        heads,
        rope_of(settings, kind, heads.head_dim),
        scale=settings.positive_float("query_pre_attn_scalar") ** -0.5,
        window=settings.window() if kind == SLIDING else 0,
        qk_norm=True,
    )
