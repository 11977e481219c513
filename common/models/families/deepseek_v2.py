"""DeepSeek-V2, as far as it has no experts: latent attention."""

from common.base.errors import ModelError
from common.models.config import MLP, DecoderConfig
from common.models.latent import latent_config, mlps_behind_dense, read_latent
from common.models.settings import Settings


def decoder_config(settings: Settings) -> DecoderConfig:
    """Return the config of the forward pass; raises ModelError for an unsupported setting."""
    return latent_config(settings, mlps_behind_dense(settings, _experts), read_latent(settings))


def _experts(settings: Settings) -> MLP:
    raise ModelError(f"{settings.where}: experts are not supported, only first_k_dense_replace = num_hidden_layers")
