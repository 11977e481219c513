"""Reading of decoders with latent attention: the keys of config.json common to DeepSeek's and Mistral's."""

from dataclasses import replace

from common.base.errors import ModelError
from common.base.routing import Route, Score
from common.models.config import MLP, DecoderConfig, Layer
from common.models.rope_scaling import read_growth, score_factor, yarn_rope
from common.models.settings import MAX_EXPERTS, MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, MAX_WIDTH, Settings
from common.models.sizes.experts import ExpertNames, Experts
from common.models.sizes.latent import Latent
from common.models.sizes.mlp import GatedMLP
from common.models.sizes.rope import Rope
from common.models.sizes.stacks import Source


def latent_config(settings: Settings, experts: Experts) -> DecoderConfig:
    """Return the config of a decoder of latent attention and experts; raises ModelError for an unsupported setting."""
    settings.refuse("hidden_act", "silu")
    mixer, mlps = read_latent(settings), mlps_behind_dense(settings, experts)
    return DecoderConfig(
        vocab_size=settings.count("vocab_size", MAX_WIDTH),
        norm_eps=settings.positive_float("rms_norm_eps", 1e-6),
        max_positions=settings.max_positions(),
        tied_embeddings=settings.flag("tie_word_embeddings"),
        dtype=settings.dtype(),
        layers=tuple(Layer(mixer, mlp) for mlp in mlps),
        source=Source(settings.count("hidden_size", MAX_WIDTH), ignored=_ignored(settings, len(mlps))),
        exceeds_float16=True,
    )


def _ignored(settings: Settings, num_layers: int) -> tuple[str, ...]:
    """Return beginnings of names of tensors of further layers, which predict tokens behind the next."""
    predicting = settings.values.get("num_nextn_predict_layers")
    count = settings.count("num_nextn_predict_layers", MAX_LAYERS) if predicting else 0
    return tuple(f"model.layers.{number}." for number in range(num_layers, num_layers + count))


def read_latent(settings: Settings) -> Latent:
    """Return the sizes of latent attention; raises ModelError for an unsupported setting."""
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
    )


def _read_rope(settings: Settings, dim: int) -> tuple[Rope, float]:
    """Return the rotation, and the factor of scores that YaRN asks for."""
    rope = yarn_rope(settings, dim)
    _, scaling = settings.rope()
    return replace(rope, growth=read_growth(settings, scaling)), score_factor(settings, scaling)


def read_experts(settings: Settings, route: Route, *, has_selection_bias: bool = False) -> Experts:
    """Return the sizes of a layer's experts; raises ModelError for a choice of groups that the experts do not allow."""
    num, shared = settings.count("n_routed_experts", MAX_EXPERTS), settings.values.get("n_shared_experts")
    per_group = num // route.groups
    if num % route.groups or route.group_best > per_group or route.per_token > route.kept_groups * per_group:
        raise ModelError(
            f"{settings.where}: {num} experts in n_group = {route.groups} groups, of which topk_group = "
            f"{route.kept_groups} have num_experts_per_tok = {route.per_token}, cannot be; fetch the model again"
        )
    return Experts(
        num,
        inner=settings.count("moe_intermediate_size", MAX_WIDTH),
        route=route,
        num_shared=settings.count("n_shared_experts", MAX_EXPERTS) if shared else 0,
        names=ExpertNames(
            shared="mlp.shared_experts" if shared else "",
            selection_bias="mlp.gate.e_score_correction_bias" if has_selection_bias else "",
        ),
    )


def read_route(settings: Settings, *, score: Score, renormalizes: bool, group_best: int = 1) -> Route:
    """Return a token's choice of experts."""
    groups = settings.count("n_group", MAX_EXPERTS, 1)
    return Route(
        per_token=settings.count("num_experts_per_tok", MAX_EXPERTS),
        score=score,
        renormalizes=renormalizes,
        scale=settings.positive_float("routed_scaling_factor", 1.0),
        groups=groups,
        kept_groups=settings.count("topk_group", groups, groups),
        group_best=group_best,
    )


def mlps_behind_dense(settings: Settings, experts: Experts) -> list[MLP]:
    """Return the MLPs of all layers: `first_k_dense_replace` of the usual kind, then experts."""
    settings.refuse("moe_layer_freq", 1)
    settings.refuse("mlp_bias", False)
    num_layers = settings.count("num_hidden_layers", MAX_LAYERS)
    num_dense = settings.values.get("first_k_dense_replace")
    num_dense = 0 if num_dense is None else num_dense
    if type(num_dense) is not int or not 0 <= num_dense <= num_layers:
        raise ModelError(f"{settings.where}: first_k_dense_replace = {num_dense!r:.80}, 0 to {num_layers} is needed")
    dense: list[MLP] = [GatedMLP(settings.count("intermediate_size", MAX_WIDTH))] * num_dense if num_dense else []
    return dense + [experts] * (num_layers - num_dense)
