"""DeepSeek-V2-Lite, V2 and V2.5: latent attention, and experts chosen by a softmax."""

from common.base.routing import Score
from common.models.config import DecoderConfig
from common.models.latent import latent_config, read_experts, read_route
from common.models.settings import Settings


def decoder_config(settings: Settings) -> DecoderConfig:
    """Return the config of the forward pass; raises ModelError for an unsupported setting."""
    settings.refuse("scoring_func", "softmax")
    settings.refuse("norm_topk_prob", False)
    if settings.values.get("topk_method") != "group_limited_greedy":
        settings.refuse("topk_method", "greedy")
        settings = Settings(settings.values | {"n_group": 1, "topk_group": 1}, settings.where)
    return latent_config(
        settings, read_experts(settings, read_route(settings, score=Score.SOFTMAX, renormalizes=False))
    )
