"""DeepSeek-V3, R1 and V3.1: latent attention, and experts chosen by a sigmoid and a bias that balances their load."""

from common.base.routing import Score
from common.models.config import DecoderConfig
from common.models.latent import latent_config, read_experts, read_route
from common.models.settings import Settings

LEFT_OUT = {"n_group": 8, "topk_group": 4, "n_shared_experts": 1, "first_k_dense_replace": 3}
"""Settings that files may leave out."""


def decoder_config(settings: Settings) -> DecoderConfig:
    """Return the config of the forward pass; raises ModelError for an unsupported setting."""
    settings = settings.completed(LEFT_OUT)
    settings.refuse("scoring_func", "sigmoid")
    settings.refuse("topk_method", "noaux_tc")
    renormalizes = settings.flag("norm_topk_prob", default=True)
    route = read_route(settings, score=Score.SIGMOID, renormalizes=renormalizes, group_best=2)
    return latent_config(settings, read_experts(settings, route, has_selection_bias=True))
