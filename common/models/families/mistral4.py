"""Mistral Small 4: latent attention whose queries grow with their position, and experts chosen by a softmax."""

import math

from common.base.routing import Score
from common.models.config import DecoderConfig
from common.models.latent import latent_config, read_experts, read_route
from common.models.settings import MAX_HEAD_DIM, Settings

LEFT_OUT = {"n_shared_experts": 1}
"""Settings that files may leave out."""


def decoder_config(settings: Settings) -> DecoderConfig:
    """Return the config of the forward pass; raises ModelError for an unsupported setting."""
    settings = _without_share(settings.completed(LEFT_OUT))
    renormalizes = settings.flag("norm_topk_prob", default=True)
    route = read_route(settings, score=Score.SOFTMAX, renormalizes=renormalizes, group_best=2)
    return latent_config(settings, read_experts(settings, route))


def _without_share(settings: Settings) -> Settings:
    """Return the settings without the share of a head that turns, where it says what the sizes say as well."""
    settings.require_rope_table()
    table = settings.rope_table()
    share = table.get("partial_rotary_factor")
    turned, still = (settings.count(f"qk_{name}_head_dim", MAX_HEAD_DIM) for name in ("rope", "nope"))
    if not isinstance(share, float) or not math.isclose(share, turned / (turned + still)):
        return settings
    others = {key: value for key, value in table.items() if key != "partial_rotary_factor"}
    return Settings(settings.values | {"rope_parameters": others, "rope_scaling": None}, settings.where)
