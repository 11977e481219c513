"""DeepSeek-V2-Lite, V2 and V2.5: latent attention, and experts chosen by a softmax."""

from common.models.config import MLP, DecoderConfig
from common.models.latent import latent_config, mlps_behind_dense, read_latent
from common.models.settings import Settings


def decoder_config(settings: Settings) -> DecoderConfig:
    """Return the config of the forward pass; raises ModelError for an unsupported setting."""
    return latent_config(settings, mlps_behind_dense(settings, _experts), read_latent(settings))


def _experts(settings: Settings) -> MLP:
    raise NotImplementedError
