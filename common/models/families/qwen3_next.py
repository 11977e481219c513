"""Qwen3-Next (80B-A3B): the layers of Qwen3.5 with experts, in another layout of the checkpoint."""

from common.models.config import DecoderConfig
from common.models.families.qwen3_5_text import hybrid_config
from common.models.settings import Settings
from common.models.sparse import read_experts, sparse_layers


def decoder_config(settings: Settings) -> DecoderConfig:
    """Return the config of the forward pass; raises ModelError for an unsupported setting."""
    renormalizes = settings.flag("norm_topk_prob", default=True)
    experts = read_experts(settings, renormalizes=renormalizes, has_shared=True)
    return hybrid_config(settings, sparse_layers(settings, experts), by_key_head=True)
