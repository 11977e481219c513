"""Reading of a model with the form in which each of its matrices is held.

Needs no torch, and numpy only for a model in codes: the supervisor's start does not wait for it.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from common.base.errors import ModelError
from common.checkpoint.gguf.model_file import is_gguf, read_gguf
from common.models.config import DecoderConfig
from common.models.forms import Forms
from common.models.loading.checkpoint import stored_tensors
from common.models.reading import KEEP, PACKED, read_config
from common.models.sizes.codes import Codes
from common.models.sizes.quantized import HEAD, with_whole_experts


def read_model(path: Path, forms: Forms, head: str = KEEP) -> DecoderConfig:
    """Return the config with the matrices that stay in the checkpoint's codes, where they do.

    Args:
        forms: of the device. Raises ModelError for an unsupported model or broken files.
        head: the choice of `model.head`.
    """
    config = read_config(path, forms.choice, head)
    if not (forms.bytes_stay or forms.in_groups):
        return config
    found = {name: form for name, form in _stored_forms(path, config).items() if name != HEAD or not config.head}
    if not found:
        return config
    kept = with_whole_experts({name: form for name, form in found.items() if forms.stays(form)})
    others = [form for name, form in found.items() if name not in kept]
    return replace(config, kept=tuple(kept.items()), held_as=_told(forms, kept.values(), others))


def _stored_forms(path: Path, config: DecoderConfig) -> dict[str, Codes]:
    """Return the checkpoint's own forms of stacks that one form holds, by name; a head quantized by choice has none."""
    if is_gguf(path):
        from common.models.gguf.forms import kept_blocks

        return kept_blocks(config.stacks(), read_gguf(path).tensors)
    if config.quantization is None:
        return {}
    from common.models.quantization.found import find_packed, matrices_of
    from common.models.quantization.kept import kept_codes

    stacks, stored = config.stacks(), stored_tensors(path)
    matrices = find_packed(matrices_of(stacks), stored, config.quantization).matrices
    return kept_codes(stacks, stored, matrices)


def _told(forms: Forms, kept: Iterable[Codes], others: Iterable[Codes]) -> str:
    """Return in words in which forms matrices stay, and why others are made plain."""
    stay, go = _counted(kept), _counted(others)
    told = f"products are in the checkpoint's codes: {stay}" if stay else "products are plain"
    told += f", by model.quantization = {forms.choice} on {forms.device}"
    keeps = f"model.quantization = {PACKED} keeps them"
    return f"{told}; {go} are made plain, because {forms.reason} ({keeps})" if go else told


def _counted(forms: Iterable[Codes]) -> str:
    count = Counter(form.label for form in forms)
    return ", ".join(f"{number} in {label}" for label, number in count.items())


def sized_model(path: Path, forms: Forms, head: str = KEEP) -> DecoderConfig:
    """Return a model to count bytes by: as `read_model`, and as if all were plain where files of weights lack or fail.

    Raises ModelError for an unsupported model.
    """
    try:
        return read_model(path, forms, head)
    except ModelError:
        return read_config(path, forms.choice, head)
