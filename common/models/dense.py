"""Reading of dense decoders: the keys of config.json common to all dense families."""

from collections.abc import Callable

from common.base.errors import ModelError
from common.models.config import DecoderConfig, Layer
from common.models.settings import MAX_HEADS, MAX_LAYERS, MAX_WIDTH, Settings
from common.models.sizes.attention import Attention, Heads
from common.models.sizes.mlp import GatedMLP
from common.models.sizes.rope import Rope
from common.models.sizes.stacks import Source

Rotation = Callable[[Settings, int], Rope]
"""Reads the rotation of heads of some dimensions from config.json; raises ModelError for an unsupported scaling."""


def dense_config(
    settings: Settings,
    *,
    default_eps: float,
    rotation: Rotation,
    qk_norm: bool = False,
    qkv_bias: bool = False,
    window: int = 0,
) -> DecoderConfig:
    """Return the config of a dense decoder whose layers are equal.

    Args:
        default_eps: epsilon of the norms if config.json names none.
        rotation: the family's reader of the rotation, whose scalings differ.
        qk_norm: query and key heads are normed before the rotation.
        qkv_bias: Q, K and V have biases, whether config.json says so or not.
        window: tokens seen by a token, in every layer; 0: all.
    """
    settings.refuse("hidden_act", "silu")
    if not qkv_bias:
        settings.refuse("attention_bias", False)
    settings.refuse("mlp_bias", False)
    settings.refuse_other_layers()
    hidden_size, heads = settings.count("hidden_size", MAX_WIDTH), read_heads(settings)
    layer = Layer(
        Attention(heads, rotation(settings, heads.head_dim), window=window, qk_norm=qk_norm, has_bias=qkv_bias),
        GatedMLP(settings.count("intermediate_size", MAX_WIDTH)),
    )
    return DecoderConfig(
        vocab_size=settings.count("vocab_size", MAX_WIDTH),
        norm_eps=settings.positive_float("rms_norm_eps", default_eps),
        max_positions=settings.max_positions(),
        tied_embeddings=settings.flag("tie_word_embeddings"),
        dtype=settings.dtype(),
        layers=(layer,) * settings.count("num_hidden_layers", MAX_LAYERS),
        source=Source(hidden_size),
    )


def read_heads(settings: Settings) -> Heads:
    """Return the geometry of attention; raises ModelError if query heads cannot share KV heads evenly."""
    num_q_heads = settings.count("num_attention_heads", MAX_HEADS)
    num_kv_heads = settings.count("num_key_value_heads", MAX_HEADS, num_q_heads)
    if num_q_heads % num_kv_heads:
        raise ModelError(
            f"{settings.where}: {num_q_heads} query heads over {num_kv_heads} KV heads, "
            "a multiple of them is needed; do config.json and the weights belong together?"
        )
    return Heads(num_q_heads, num_kv_heads, settings.head_dim(settings.count("hidden_size", MAX_WIDTH), num_q_heads))
