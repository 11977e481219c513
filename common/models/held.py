"""Reading of a model with the form in which each of its matrices is held.

Needs no torch, and numpy only for a model in codes: the supervisor's start does not wait for it.
"""

from dataclasses import replace
from pathlib import Path

from common.base.errors import ModelError
from common.checkpoint.gguf.model_file import is_gguf, read_gguf
from common.models.config import DecoderConfig
from common.models.loading.checkpoint import stored_tensors
from common.models.reading import AS_STORED, KEEP, PACKED, read_config
from common.models.sizes.codes import Codes
from common.models.sizes.quantized import HEAD


def read_model(path: Path, quantization: str, head: str = KEEP) -> DecoderConfig:
    """Return the config with the matrices that stay in the checkpoint's codes, where they do.

    Args:
        quantization: the choice of `model.quantization`. Raises ModelError for an unsupported model or broken files.
        head: the choice of `model.head`.
    """
    config = read_config(path, quantization, head)
    if quantization not in (AS_STORED, PACKED):
        return config
    if is_gguf(path):
        if quantization == AS_STORED:
            return config
        from common.models.gguf.forms import kept_blocks

        return _with_kept(config, kept_blocks(config.stacks(), read_gguf(path).tensors))
    if config.quantization is None:
        return config
    from common.models.quantization.found import find_packed, matrices_of
    from common.models.quantization.kept import kept_codes

    stacks, stored = config.stacks(), stored_tensors(path)
    matrices = find_packed(matrices_of(stacks), stored, config.quantization).matrices
    forms = kept_codes(stacks, stored, matrices)
    if quantization == AS_STORED:
        forms = {name: form for name, form in forms.items() if not form.is_integers}
    return _with_kept(config, forms)


def _with_kept(config: DecoderConfig, forms: dict[str, Codes]) -> DecoderConfig:
    """Return the config with forms of a checkpoint's own; a head quantized by choice has none."""
    return replace(config, kept=tuple((name, form) for name, form in forms.items() if name != HEAD or not config.head))


def sized_model(path: Path, quantization: str = AS_STORED, head: str = KEEP) -> DecoderConfig:
    """Return a model to count bytes by: as `read_model`, and as if all were plain where files of weights lack or fail.

    Raises ModelError for an unsupported model.
    """
    try:
        return read_model(path, quantization, head)
    except ModelError:
        return read_config(path, quantization, head)
