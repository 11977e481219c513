"""Gemma 4: layers with a window and layers that see all have heads of their own; keys may be values, too."""

from common.base.activation import Activation
from common.base.errors import ModelError
from common.base.routing import Route
from common.models.config import MLP, DecoderConfig, Layer
from common.models.dense import read_heads
from common.models.gemma import layer_kinds, refuse_others, rope_of
from common.models.settings import FULL, MAX_EXPERTS, MAX_WIDTH, SLIDING, Settings
from common.models.sizes.attention import Attention, Heads
from common.models.sizes.experts import ExpertNames, Experts
from common.models.sizes.mlp import GatedMLP
from common.models.sizes.parallel_experts import ParallelExperts
from common.models.sizes.stacks import SANDWICH_NORMS, Source

LEFT_OUT = {
    "global_head_dim": 512,
    "tie_word_embeddings": True,
    "rope_parameters": {
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
        SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    },
}
"""Settings that files may leave out."""
EXPERTS = ExpertNames("router.proj", "experts", expert_scale="router.per_expert_scale")
SMALL_MODELS = {
    "hidden_size_per_layer_input": "inputs of each layer",
    "num_kv_shared_layers": "keys and values shared between layers",
}
"""Settings of E2B and E4B, which are not computed."""


def decoder_config(settings: Settings) -> DecoderConfig:
    """Return the config of the forward pass; raises ModelError for an unsupported setting."""
    settings = settings.completed(LEFT_OUT)
    _refuse(settings)
    hidden_size = settings.count("hidden_size", MAX_WIDTH)
    mlp = _mlp(settings, hidden_size)
    kinds = layer_kinds(settings)
    kinds[-1] = FULL
    has_cap = settings.values.get("final_logit_softcapping") is not None
    return DecoderConfig(
        vocab_size=settings.count("vocab_size", MAX_WIDTH),
        norm_eps=settings.positive_float("rms_norm_eps", 1e-6),
        max_positions=settings.max_positions(),
        tied_embeddings=settings.flag("tie_word_embeddings"),
        dtype=settings.dtype(),
        layers=tuple(Layer(_attention(settings, *each), mlp, is_scaled=True) for each in enumerate(kinds)),
        source=Source(hidden_size, norms=SANDWICH_NORMS),
        embed_scale=hidden_size**0.5,
        logit_cap=settings.positive_float("final_logit_softcapping") if has_cap else 0.0,
        exceeds_float16=True,
    )


def _refuse(settings: Settings) -> None:
    refuse_others(settings)
    for key, meaning in SMALL_MODELS.items():
        if settings.values.get(key):
            raise ModelError(
                f"{settings.where}: {key} = {settings.values[key]!r:.80}: {meaning}, as in Gemma 4 E2B and E4B, "
                "are not supported; serve 12B, 26B-A4B or 31B"
            )
    settings.refuse("use_double_wide_mlp", False)
    settings.refuse("use_bidirectional_attention", "vision")  # matters for images only


def _mlp(settings: Settings, hidden_size: int) -> MLP:
    """Return the MLP of every layer, with experts beside it in 26B-A4B."""
    dense = GatedMLP(settings.count("intermediate_size", MAX_WIDTH), Activation.GELU_TANH)
    if not settings.flag("enable_moe_block"):
        return dense
    num = settings.count("num_experts", MAX_EXPERTS)
    experts = Experts(
        num=num,
        inner=settings.count("moe_intermediate_size", MAX_WIDTH),
        route=Route(settings.count("top_k_experts", num), logit_scale=hidden_size**-0.5),
        activation=Activation.GELU_TANH,
        names=EXPERTS,
    )
    return ParallelExperts(dense, experts)


def _attention(settings: Settings, number: int, kind: str) -> Attention:
    """Return the attention of a layer; where keys are values, layers that see all have no weights of values."""
    heads = _heads(settings, number, kind)
    is_full = kind == FULL
    return Attention(
        heads,
        rope_of(settings, kind, heads.head_dim),
        scale=1.0,
        window=0 if is_full else settings.window(),
        qk_norm=True,
        value_norm=True,
        shares_kv=is_full and settings.flag("attention_k_eq_v"),
    )


def _heads(settings: Settings, number: int, kind: str) -> Heads:
    """Return a layer's heads, from a table by layer or from settings of the layers that see all."""
    tables = settings.values.get("per_layer_config")
    if tables is None:
        of_full = {"head_dim": settings.values["global_head_dim"]}
        if settings.flag("attention_k_eq_v") and settings.values.get("num_global_key_value_heads") is not None:
            of_full["num_key_value_heads"] = settings.values["num_global_key_value_heads"]
        tables = {str(number): of_full} if kind == FULL else {}
    table = tables.get(str(number), {}) if isinstance(tables, dict) else tables
    if not isinstance(table, dict):
        raise ModelError(f"{settings.where}: per_layer_config = {tables!r:.200}, an object of objects is needed")
    return read_heads(Settings(settings.values | table, settings.where))
