"""The model that a worker serves on its device, and what identifies it."""

from pathlib import Path

import torch

from common.kernels.base.gpu import gpu_of
from common.models.config import DecoderConfig
from common.models.forms import Target, forms_on
from common.models.held import read_model
from common.settings.config import Config


def served_model(config: Config, device: torch.device) -> DecoderConfig:
    """Return the model, with matrices in the forms that `model.quantization` means on a device.

    Raises ModelError for an unsupported model or broken files.
    """
    capability = gpu_of(device).capability if device.type == "cuda" else None
    forms = forms_on(Target.of(config, capability), config.model.quantization)
    return read_model(Path(config.model.path), forms, config.model.head)
