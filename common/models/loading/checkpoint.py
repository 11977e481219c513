"""Safetensors files of a checkpoint: their tensors, by names without the wrapper of a model of several senses.

Headers are read without torch and without the package.
"""

import json
import os
from pathlib import Path
from typing import Any

from common.base.errors import ConfigError, ModelError
from common.checkpoint.tensor_header import read_header
from common.models.quantization.stored import StoredTensor

WRAPPERS = ("model.language_model.", "language_model.")
"""Beginnings of names in checkpoints that hold a text model among others."""
_SHOWN = 5


def stored_tensors(model_dir: Path) -> dict[str, StoredTensor]:
    """Return the checkpoint's tensors; raises ModelError for files that are lost or broken.

    A tensor that is not in the file where the index has it has no dtype.
    """
    files = _tensor_files(model_dir)
    headers = {path: _header(path) for path in sorted(set(files.values()))}
    return {
        _unwrapped(name): headers[path].get(name, StoredTensor(path, name, "", (), 0)) for name, path in files.items()
    }


def _unwrapped(name: str) -> str:
    """Return a name without the wrapper that a text model of several senses stands in."""
    for wrapper in WRAPPERS:
        if name.startswith(wrapper):
            return name.replace("language_model.", "", 1)
    return name


def _tensor_files(model_dir: Path) -> dict[str, Path]:
    """Return the file of each checkpoint tensor."""
    index = model_dir / "model.safetensors.index.json"
    if index.exists():
        return _files_of_index(index)
    single = model_dir / "model.safetensors"
    if not single.exists():
        raise ModelError(f"{model_dir}: neither model.safetensors nor model.safetensors.index.json")
    return dict.fromkeys(_header(single), single)


def _files_of_index(index: Path) -> dict[str, Path]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        paths = {file: index.parent / Path(str(file)).name for file in set(weight_map.values())}
        files = {str(name): paths[file] for name, file in weight_map.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{index}: not an index of safetensors files ({error}); fetch the model again") from None
    lost = sorted({path.name for path in paths.values() if not os.path.isfile(path)})  # isfile takes any name
    if lost:
        raise ModelError(f"{index}: names files that are not there: {listed(lost)}; fetch the model again")
    return files


def opened(path: Path) -> Any:
    """Return a file as safetensors reads it, which checks its header; raises ModelError for any other file."""
    from safetensors import safe_open  # missing where models are sized, and not loaded

    try:
        return safe_open(path, framework="pt")
    except Exception as error:  # noqa: BLE001 - safetensors' own error type is not exported
        raise ModelError(f"{path}: not a safetensors file ({error}); fetch the model again") from None


def _header(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a file by their names in it."""
    try:
        entries = read_header(path)
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}; fetch the model again") from None
    except ConfigError as error:
        raise ModelError(str(error)) from None
    return {name: StoredTensor(path, name, each.dtype, each.shape, each.begin) for name, each in entries.items()}


def listed(items: list[str]) -> str:
    """Return the first of some items, and how many more there are."""
    more = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return ", ".join(items[:_SHOWN]) + more
