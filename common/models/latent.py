"""Reading of decoders with latent attention: the keys of config.json common to DeepSeek's and Mistral's."""

from collections.abc import Callable
from dataclasses import replace

from common.base.errors import ModelError
from common.models.config import MLP, DecoderConfig, Layer
from common.models.rope_scaling import read_growth, score_factor, yarn_rope
from common.models.settings import MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, MAX_WIDTH, Settings
from common.models.sizes.latent import Latent
from common.models.sizes.mlp import GatedMLP
from common.models.sizes.rope import Rope
from common.models.sizes.stacks import Source
from common.settings.config import MAX_TOKENS


def latent_config(settings: Settings, mlps: list[MLP], mixer: Latent, *, default_eps: float = 1e-6) -> DecoderConfig:
    """Return the config of a decoder whose layers have equal latent attention.

    Args:
        mlps: of each layer.
        default_eps: epsilon of the layers' norms if config.json names none.
    """
    settings.refuse("hidden_act", "silu")
    settings.refuse("quantization_config", None)
    layers = settings.count("num_hidden_layers", MAX_LAYERS)
    predicting = f"model.layers.{layers}."  # a further layer that predicts a second token
    return DecoderConfig(
        vocab_size=settings.count("vocab_size", MAX_WIDTH),
        norm_eps=settings.positive_float("rms_norm_eps", default_eps),
        max_positions=settings.count("max_position_embeddings", MAX_TOKENS),
        tied_embeddings=settings.flag("tie_word_embeddings"),
        dtype=settings.dtype(),
        layers=tuple(Layer(mixer, mlp) for mlp in mlps),
        source=Source(settings.count("hidden_size", MAX_WIDTH), ignored=(predicting,)),
    )


def read_latent(settings: Settings, *, norm_eps: float = 1e-6) -> Latent:
    """Return the sizes of latent attention; raises ModelError for an unsupported setting.

    Args:
        norm_eps: epsilon of the norms of latents and of the vector before queries.
    """
    settings.refuse("attention_bias", False)
    settings.refuse("rope_interleave", True)
    num_heads = settings.count("num_attention_heads", MAX_HEADS)
    settings.refuse("num_key_value_heads", num_heads)
    nope_dim = settings.count("qk_nope_head_dim", MAX_HEAD_DIM)
    rope_dim = settings.even("qk_rope_head_dim", MAX_HEAD_DIM)
    rope, factor = _read_rope(settings, rope_dim)
    return Latent(
        num_heads=num_heads,
        rank=settings.count("kv_lora_rank", MAX_WIDTH),
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        value_dim=settings.count("v_head_dim", MAX_HEAD_DIM),
        rope=rope,
        scale=(nope_dim + rope_dim) ** -0.5 * factor,
        q_rank=0 if settings.values.get("q_lora_rank") is None else settings.count("q_lora_rank", MAX_WIDTH),
        norm_eps=norm_eps,
    )


def _read_rope(settings: Settings, dim: int) -> tuple[Rope, float]:
    """Return the rotation, and the factor of scores that YaRN asks for."""
    rope = yarn_rope(settings, dim)
    _, scaling = settings.rope()
    return replace(rope, growth=read_growth(settings, scaling)), score_factor(settings, scaling)


def mlps_behind_dense(settings: Settings, experts: Callable[[Settings], MLP]) -> list[MLP]:
    """Return the MLPs of all layers: `first_k_dense_replace` of the usual kind, then experts."""
    settings.refuse("moe_layer_freq", 1)
    settings.refuse("mlp_bias", False)
    num_layers = settings.count("num_hidden_layers", MAX_LAYERS)
    num_dense = settings.values.get("first_k_dense_replace") or 0
    if not isinstance(num_dense, int) or not 0 <= num_dense <= num_layers:
        raise ModelError(f"{settings.where}: first_k_dense_replace = {num_dense!r:.80}, 0 to {num_layers} is needed")
    mlps: list[MLP] = [GatedMLP(settings.count("intermediate_size", MAX_WIDTH))] * num_dense if num_dense else []
    return mlps + [experts(settings)] * (num_layers - num_dense) if num_dense < num_layers else mlps
