"""Qwen3.5 and Qwen3.6 with experts (35B-A3B, 122B-A10B, 397B-A17B): Qwen3.5's layers, and experts with a shared one."""

from common.models.config import DecoderConfig
from common.models.families.qwen3_5_text import hybrid_config
from common.models.settings import MAX_LAYERS, Settings
from common.models.sparse import read_experts


def decoder_config(settings: Settings) -> DecoderConfig:
    """Return the config of the forward pass; raises ModelError for an unsupported setting."""
    settings.refuse("norm_topk_prob", True)
    settings.refuse("mlp_only_layers", [])
    experts = read_experts(settings, renormalizes=True, has_shared=True)
    return hybrid_config(settings, [experts] * settings.count("num_hidden_layers", MAX_LAYERS))
