"""Qwen3, dense (0.6B to 32B): query and key heads are normed before the rotation."""

from common.errors import ModelError
from common.models.decoder import DecoderConfig
from common.models.settings import Settings, inverse_frequencies


def decoder_config(settings: Settings) -> DecoderConfig:
    """The forward pass's config; raises ModelError for a setting that this file does not compute."""
    settings.refuse("hidden_act", "silu")
    settings.refuse("attention_bias", False)
    settings.refuse("use_sliding_window", False)
    base, scaling = settings.rope()
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind != "default":
        raise ModelError(f"{settings.where}: RoPE scaling {kind!r} is not supported for qwen3, remove it")
    hidden, num_q_heads = settings.positive_int("hidden_size"), settings.positive_int("num_attention_heads")
    head_dim = settings.positive_int("head_dim", hidden // num_q_heads)
    return DecoderConfig(
        vocab_size=settings.positive_int("vocab_size"),
        hidden_size=hidden,
        intermediate_size=settings.positive_int("intermediate_size"),
        num_layers=settings.positive_int("num_hidden_layers"),
        num_q_heads=num_q_heads,
        num_kv_heads=settings.positive_int("num_key_value_heads", num_q_heads),
        head_dim=head_dim,
        norm_eps=settings.positive_float("rms_norm_eps", 1e-6),
        max_positions=settings.positive_int("max_position_embeddings"),
        tied_embeddings=bool(settings.values.get("tie_word_embeddings", False)),
        qk_norm=True,
        inverse_frequencies=tuple(inverse_frequencies(base, head_dim)),
        dtype=settings.dtype(),
    )
