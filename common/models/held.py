"""Reading of a model with the form in which each of its matrices is held. Needs no torch."""

from dataclasses import replace
from pathlib import Path

from common.base.errors import ModelError
from common.models.config import DecoderConfig
from common.models.loading.checkpoint import stored_tensors
from common.models.quantization.found import find_packed, matrices_of
from common.models.quantization.kept import kept_codes
from common.models.reading import AS_STORED, read_config


def read_model(path: Path, quantization: str) -> DecoderConfig:
    """Return the config with the matrices that stay in the checkpoint's codes, where they do.

    Args:
        quantization: the choice of `model.quantization`. Raises ModelError for an unsupported model or broken files.
    """
    config = read_config(path, quantization)
    if config.quantization is None or quantization != AS_STORED:
        return config
    stacks, stored = config.stacks(), stored_tensors(path)
    matrices = find_packed(matrices_of(stacks), stored, config.quantization).matrices
    return replace(config, kept=tuple(kept_codes(stacks, stored, matrices).items()))


def sized_model(path: Path, quantization: str = AS_STORED) -> DecoderConfig:
    """Return a model to count bytes by: as `read_model`, and as if all were plain where files of weights lack or fail.

    Raises ModelError for an unsupported model.
    """
    try:
        return read_model(path, quantization)
    except ModelError:
        return read_config(path, quantization)
