"""Qwen3 with experts (30B-A3B, 235B-A22B): Qwen3's attention, and experts instead of an MLP."""

from dataclasses import replace

from common.models.config import DecoderConfig, Layer
from common.models.dense import dense_config
from common.models.rope_scaling import yarn_rope
from common.models.settings import Settings
from common.models.sparse import read_experts, sparse_layers


def decoder_config(settings: Settings) -> DecoderConfig:
    """Return the config of the forward pass; raises ModelError for an unsupported setting."""
    settings.refuse("use_sliding_window", False)
    config = dense_config(settings, default_eps=1e-6, qk_norm=True, rotation=yarn_rope)
    mlps = sparse_layers(settings, read_experts(settings, renormalizes=settings.flag("norm_topk_prob")))
    return replace(
        config, layers=tuple(Layer(layer.mixer, mlp) for layer, mlp in zip(config.layers, mlps, strict=True))
    )
