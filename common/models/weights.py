"""Load safetensors files into stacked tensors on a device; every name and shape is checked.

A checkpoint is checked as a whole before anything is loaded: a single error names all missing, unexpected or misshapen
tensors. safetensors checks the files; `upload` reads the bytes.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from safetensors import safe_open
from torch import Tensor

from common.base.errors import ModelError
from common.models.config import Piece, Pieces
from common.models.upload import Part, Progress, Upload

# Buffers that old checkpoints carry although their values follow from the config.
IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)
_FLOAT_TYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_SHOWN = 5
ALIGNMENT_BYTES = 256


@dataclass(frozen=True, slots=True)
class WeightsLayout:
    """Places of the stacked tensors in one region of memory."""

    pieces: Pieces
    dtype: torch.dtype
    offsets: dict[str, int]  # bytes
    num_bytes: int

    @property
    def name(self) -> str:
        """Return a digest, equal for layouts with the same tensors at the same places."""
        described = [(name, _stacked_shape(stacked), self.offsets[name]) for name, stacked in self.pieces.items()]
        return hashlib.sha256(repr([str(self.dtype), described]).encode()).hexdigest()[:16]

    def tensors(self, region: Tensor) -> dict[str, Tensor]:
        """Return views of a region `[num_bytes]` uint8, by tensor name."""
        return {name: self._view(region, name, stacked) for name, stacked in self.pieces.items()}

    def _view(self, region: Tensor, name: str, stacked: list[Piece]) -> Tensor:
        shape, begin = _stacked_shape(stacked), self.offsets[name]
        return region[begin : begin + math.prod(shape) * self.dtype.itemsize].view(self.dtype).view(shape)


def weights_layout(pieces: Pieces, dtype: torch.dtype) -> WeightsLayout:
    """Lay tensors out one behind the other, each aligned like a separate allocation."""
    offsets, end = {}, 0
    for name, stacked in pieces.items():
        offsets[name] = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        end = offsets[name] + math.prod(_stacked_shape(stacked)) * dtype.itemsize
    return WeightsLayout(pieces, dtype, offsets, end)


class Loading(Protocol):
    """Weights being loaded; as a context, the loading is given up when something fails inside."""

    def wait(self) -> None:
        """Return when all weights are loaded; raises ModelError for an unreadable file."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None: ...


Fill = Callable[[Tensor, Progress], Loading]
"""Begins to load weights into a region."""


class WeightsMemory(Protocol):
    """Owner of the memory of weights."""

    def begin(self, layout: WeightsLayout, fill: Fill) -> tuple[Tensor, Loading]:
        """Return a region `[num_bytes]` uint8, and the loading of its weights: by `fill`, or by another process."""
        ...


def load_weights(
    model_dir: Path, layout: WeightsLayout, region: Tensor, *, tied_embeddings: bool, progress: Progress
) -> Upload:
    """Begin to load and stack into a region; raises ModelError naming each missing, extra or misshapen tensor."""
    files = _tensor_files(model_dir)
    wanted = {piece.checkpoint_name: piece for stacked in layout.pieces.values() for piece in stacked}
    ignored = {"lm_head.weight"} if tied_embeddings else set()
    _check_names(model_dir, wanted, files, ignored)
    dtypes = _check_shapes(model_dir, wanted, files)
    offsets = {path: _offsets(path) for path in set(files.values())}
    tensors, parts = layout.tensors(region), []
    for name, stacked in layout.pieces.items():
        for piece in stacked:
            source, path = piece.checkpoint_name, files[piece.checkpoint_name]
            target = tensors[name][piece.begin : piece.begin + piece.shape[0]].view(-1)
            parts.append(Part(path, offsets[path][source], dtypes[source], target))
    return Upload(parts, region.device, progress)


def _tensor_files(model_dir: Path) -> dict[str, Path]:
    """Return the file of each checkpoint tensor."""
    index = model_dir / "model.safetensors.index.json"
    if index.exists():
        return _files_of_index(index)
    single = model_dir / "model.safetensors"
    if not single.exists():
        raise ModelError(f"{model_dir}: neither model.safetensors nor model.safetensors.index.json")
    with _opened(single) as handle:
        return dict.fromkeys(handle.keys(), single)


def _files_of_index(index: Path) -> dict[str, Path]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = {str(name): index.parent / Path(str(file)).name for name, file in weight_map.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{index}: not an index of safetensors files ({error}); fetch the model again") from None
    lost = sorted({path.name for path in files.values() if not os.path.isfile(path)})  # isfile takes any name
    if lost:
        raise ModelError(f"{index}: names files that are not there: {_listed(lost)}; fetch the model again")
    return files


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except Exception as error:  # noqa: BLE001 - safetensors' own error type is not exported
        raise ModelError(f"{path}: not a safetensors file ({error}); fetch the model again") from None


def _check_names(model_dir: Path, wanted: dict[str, Piece], files: dict[str, Path], ignored: set[str]) -> None:
    missing = sorted(set(wanted) - set(files))
    extra = sorted(name for name in set(files) - set(wanted) - ignored if not name.endswith(IGNORED_SUFFIXES))
    problems = []
    if missing:
        problems.append(f"{len(missing)} missing tensors: {_listed(missing)}")
    if extra:
        problems.append(f"{len(extra)} unexpected tensors: {_listed(extra)}")
    if problems:
        raise ModelError(f"{model_dir}: {'; '.join(problems)}; do config.json and the weights belong together?")


def _check_shapes(model_dir: Path, wanted: dict[str, Piece], files: dict[str, Path]) -> dict[str, torch.dtype]:
    """Return the dtypes of the wanted tensors in their files; raises ModelError naming each tensor at fault."""
    problems, dtypes = [], {}
    with ExitStack() as opened:
        handles = {path: opened.enter_context(_opened(path)) for path in sorted(set(files.values()))}
        held = {path: set(handle.keys()) for path, handle in handles.items()}
        for name, piece in wanted.items():
            if name not in held[files[name]]:
                problems.append(f"{name} is not in {files[name].name}, where the index has it")
                continue
            found = handles[files[name]].get_slice(name)
            shape, dtype = tuple(found.get_shape()), found.get_dtype()
            if shape != piece.shape:
                problems.append(f"{name} is {list(shape)}, config.json says {list(piece.shape)}")
            elif dtype not in _FLOAT_TYPES:
                problems.append(f"{name} is {dtype}, supported are {', '.join(_FLOAT_TYPES)}")
            else:
                dtypes[name] = _FLOAT_TYPES[dtype]
    if problems:
        raise ModelError(f"{model_dir}: {_listed(problems)}; fetch the model again")
    return dtypes


def _offsets(path: Path) -> dict[str, int]:
    """Return the byte of the file at which each tensor begins; safetensors has checked the header."""
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_bytes))
    header.pop("__metadata__", None)
    return {name: 8 + header_bytes + entry["data_offsets"][0] for name, entry in header.items()}


def _listed(items: list[str]) -> str:
    more = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return ", ".join(items[:_SHOWN]) + more


def _stacked_shape(stacked: list[Piece]) -> tuple[int, ...]:
    rows = sum(piece.shape[0] for piece in stacked)
    return (rows, *stacked[0].shape[1:])
