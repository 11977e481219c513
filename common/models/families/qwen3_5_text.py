"""Qwen3.5 and Qwen3.6, dense: three layers of the gated delta rule, then a layer of gated attention, in turn."""

from collections.abc import Sequence
from dataclasses import replace

from common.base.errors import ModelError
from common.models.config import MLP, DecoderConfig, Layer, Mixer
from common.models.dense import read_heads
from common.models.settings import FULL, LINEAR, MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, MAX_WIDTH, Settings
from common.models.sizes.attention import Attention
from common.models.sizes.delta_rule import DeltaRule
from common.models.sizes.mlp import GatedMLP
from common.models.sizes.rope import Rope, inverse_frequencies
from common.models.sizes.stacks import Source


def decoder_config(settings: Settings) -> DecoderConfig:
    """Return the config of the forward pass; raises ModelError for an unsupported setting."""
    mlp = GatedMLP(settings.count("intermediate_size", MAX_WIDTH))
    return hybrid_config(settings, [mlp] * settings.count("num_hidden_layers", MAX_LAYERS))


def hybrid_config(settings: Settings, mlps: Sequence[MLP], *, by_key_head: bool = False) -> DecoderConfig:
    """Return the config of a decoder with an MLP or experts in each layer; raises ModelError as `decoder_config` does.

    Args:
        by_key_head: the layout of the delta rule's inputs in the checkpoint (see `DeltaRule`).
    """
    settings.refuse("hidden_act", "silu")
    settings.refuse("attention_bias", False)
    settings.refuse("attn_output_gate", True)
    settings.refuse("mamba_ssm_dtype", "float32")
    if settings.values.get("output_gate_type") != "swish":
        settings.refuse("output_gate_type", "silu")
    delta_rule = replace(_delta_rule(settings), by_key_head=by_key_head)
    mixers: dict[str, Mixer] = {FULL: _attention(settings), LINEAR: delta_rule}
    return DecoderConfig(
        vocab_size=settings.count("vocab_size", MAX_WIDTH),
        norm_eps=settings.positive_float("rms_norm_eps", 1e-6),
        max_positions=settings.max_positions(),
        tied_embeddings=settings.flag("tie_word_embeddings"),
        dtype=settings.dtype(),
        layers=tuple(Layer(mixers[kind], mlp) for kind, mlp in zip(_layer_kinds(settings), mlps, strict=True)),
        source=Source(settings.count("hidden_size", MAX_WIDTH), norm_offset=1.0, ignored=("mtp.", "model.visual.")),
    )


def _layer_kinds(settings: Settings) -> list[str]:
    """Return the kind of each layer: as listed, or every fourth of full attention."""
    count, interval = (
        settings.count("num_hidden_layers", MAX_LAYERS),
        settings.count("full_attention_interval", MAX_LAYERS, 4),
    )
    every = [LINEAR if (i + 1) % interval else FULL for i in range(count)]
    return settings.layer_kinds(LINEAR, FULL) or every


def _attention(settings: Settings) -> Attention:
    heads = read_heads(settings)
    base, share = settings.partial_rope()
    turned = int(heads.head_dim * share)
    return Attention(heads, Rope(tuple(inverse_frequencies(base, turned))), qk_norm=True, has_gate=True)


def _delta_rule(settings: Settings) -> DeltaRule:
    """Read the sizes of the gated delta rule; raises ModelError if value heads cannot share key heads evenly."""
    delta = DeltaRule(
        num_key_heads=settings.count("linear_num_key_heads", MAX_HEADS, 16),
        num_value_heads=settings.count("linear_num_value_heads", MAX_HEADS, 32),
        key_dim=settings.count("linear_key_head_dim", MAX_HEAD_DIM, 128),
        value_dim=settings.count("linear_value_head_dim", MAX_HEAD_DIM, 128),
        conv_width=settings.count("linear_conv_kernel_dim", 64, 4),
    )
    if delta.num_value_heads % delta.num_key_heads:
        raise ModelError(
            f"{settings.where}: {delta.num_value_heads} value heads over {delta.num_key_heads} key heads of linear "
            "attention, a multiple of them is needed"
        )
    return delta
