"""Load safetensors files into stacked tensors on a device; every name and shape is checked.

A checkpoint is checked as a whole before anything is loaded: a single error names all missing, unexpected or misshapen
tensors. safetensors checks the files; `upload` reads the bytes.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

import torch
from safetensors import safe_open
from torch import Tensor

from common.base.dtypes import DTYPES
from common.base.errors import ModelError
from common.models.sizes.quantized import is_quantized
from common.models.sizes.stacks import SCALES, Piece, Stack, Stacks
from common.models.upload import Part, Progress, Upload

# Buffers that old checkpoints carry although their values follow from the config.
IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)
_DTYPES = DTYPES | {"uint8": torch.uint8, "int8": torch.int8, "float8_e4m3fn": torch.float8_e4m3fn}
_FLOAT_TYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_BYTE_TYPES = {"U8": torch.uint8}
WRAPPERS = ("model.language_model.", "language_model.")
"""Beginnings of names in checkpoints that hold a text model among others."""
HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"
"""Names of the matrix of logits and of the input's table; tied models have one matrix for both."""
COMPARED_ROWS = 64
_SHOWN = 5
ALIGNMENT_BYTES = 256


@dataclass(frozen=True, slots=True)
class WeightsLayout:
    """Places of the stacked tensors in one region of memory."""

    stacks: Stacks
    dtype: torch.dtype  # of stacks that name none
    offsets: dict[str, int]  # bytes
    num_bytes: int

    @property
    def name(self) -> str:
        """Return a digest, equal for layouts with the same tensors at the same places."""
        described = [(name, stack.shape, stack.dtype, self.offsets[name]) for name, stack in self.stacks.items()]
        return hashlib.sha256(repr([str(self.dtype), described]).encode()).hexdigest()[:16]

    def is_packed(self, name: str) -> bool:
        """Tell whether a tensor holds bytes, which are loaded as they are."""
        return _dtype_of(self.stacks[name], self.dtype) == torch.uint8

    def tensors(self, region: Tensor) -> dict[str, Tensor]:
        """Return views of a region `[num_bytes]` uint8, by tensor name."""
        return {name: self._view(region, name, stack) for name, stack in self.stacks.items()}

    def _view(self, region: Tensor, name: str, stack: Stack) -> Tensor:
        begin, dtype = self.offsets[name], _dtype_of(stack, self.dtype)
        return region[begin : begin + math.prod(stack.shape) * dtype.itemsize].view(dtype).view(stack.shape)


def weights_layout(stacks: Stacks, dtype: torch.dtype) -> WeightsLayout:
    """Lay tensors out one behind the other, each aligned like a separate allocation."""
    offsets, end = {}, 0
    for name, stack in stacks.items():
        offsets[name] = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        end = offsets[name] + math.prod(stack.shape) * _dtype_of(stack, dtype).itemsize
    return WeightsLayout(stacks, dtype, offsets, end)


def _dtype_of(stack: Stack, served: torch.dtype) -> torch.dtype:
    return served if stack.dtype is None else _DTYPES[stack.dtype]


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


class Stored(NamedTuple):
    """A tensor of a checkpoint."""

    path: Path
    name: str  # in the file


def load_weights(
    model_dir: Path, layout: WeightsLayout, region: Tensor, *, ignored: tuple[str, ...], progress: Progress
) -> Upload:
    """Begin to load and stack into a region; raises ModelError naming each missing, extra or misshapen tensor.

    Args:
        ignored: beginnings of names of checkpoint tensors that are not needed.
    """
    stored = _stored_tensors(model_dir)
    stacks = {name: stack for name, stack in layout.stacks.items() if not stack.is_scales}
    chosen = {name: stack.pieces_of(stored) for name, stack in stacks.items()}
    wanted = {piece.checkpoint_name: piece for pieces in chosen.values() for piece in pieces}
    _check_names(model_dir, wanted, stored, ignored, _instead(stacks.values(), stored))
    packed = {piece.checkpoint_name for name, pieces in chosen.items() if layout.is_packed(name) for piece in pieces}
    dtypes = _check_shapes(model_dir, wanted, stored, packed)
    if HEAD not in wanted and HEAD in stored and TABLE in wanted:
        _check_tied(model_dir, stored[HEAD], stored[TABLE])
    offsets = {path: _offsets(path) for path in {each.path for each in stored.values()}}
    tensors, parts = layout.tensors(region), []
    for name, pieces in chosen.items():
        for piece in pieces:
            source, dtype = stored[piece.checkpoint_name], dtypes[piece.checkpoint_name]
            first_row, _ = piece.rows or (0, 0)
            offset = offsets[source.path][source.name] + first_row * math.prod(piece.shape[1:]) * dtype.itemsize
            target = _in_file_order(tensors[name], piece)
            scales = tensors[f"{name}{SCALES}"][piece.begin :][: piece.num_rows] if is_quantized(stacks[name]) else None
            if scales is not None:
                target = target.view(piece.stack_shape)
            parts.append(Part(source.path, offset, dtype, target, stacks[name].add, scales))
    return Upload(parts, region.device, progress)


def _in_file_order(tensor: Tensor, piece: Piece) -> Tensor:
    """Return a view of the piece's place in a stack, with the elements in the order of the file."""
    rows = tensor[piece.begin : piece.begin + piece.num_rows]
    return rows.view(-1) if piece.order is None else rows.view(piece.order.view).permute(piece.order.file)


def _instead(stacks: Iterable[Stack], held: Collection[str]) -> list[str]:
    """Return names of tensors that would stand for missing ones, in the forms that a checkpoint does not have."""
    names: list[str] = []
    for stack in (stack for stack in stacks if stack.others):
        had = stack.pieces_of(held)
        if any(piece.checkpoint_name not in held for piece in had):
            others = (form for form in (stack.pieces, *stack.others) if form is not had)
            names += [piece.checkpoint_name for form in others for piece in form if piece.checkpoint_name not in held]
    return names


def _stored_tensors(model_dir: Path) -> dict[str, Stored]:
    """Return the checkpoint's tensors, by names without the wrapper that a text model of several senses stands in."""
    return {_unwrapped(name): Stored(path, name) for name, path in _tensor_files(model_dir).items()}


def _unwrapped(name: str) -> str:
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


def _check_names(
    model_dir: Path,
    wanted: Mapping[str, Piece],
    stored: Mapping[str, Stored],
    ignored: tuple[str, ...],
    instead: list[str],
) -> None:
    missing = sorted(set(wanted) - set(stored))
    others = (name for name in set(stored) - set(wanted) if not name.startswith(ignored))
    extra = sorted(name for name in others if not name.endswith(IGNORED_SUFFIXES))
    problems = []
    if missing:
        problems.append(f"{len(missing)} missing tensors: {_listed(missing)}")
    if missing and instead:
        problems[-1] += f"; or, in another form, {_listed(instead)}"
    if extra:
        problems.append(f"{len(extra)} unexpected tensors: {_listed(extra)}")
    if problems:
        raise ModelError(f"{model_dir}: {'; '.join(problems)}; do config.json and the weights belong together?")


def _check_shapes(
    model_dir: Path, wanted: Mapping[str, Piece], stored: Mapping[str, Stored], packed: set[str]
) -> dict[str, torch.dtype]:
    """Return the dtypes of the wanted tensors in their files; raises ModelError naming each tensor at fault.

    Args:
        packed: names of tensors that hold bytes.
    """
    problems, dtypes = [], {}
    with ExitStack() as opened:
        handles = {
            path: opened.enter_context(_opened(path)) for path in sorted({each.path for each in stored.values()})
        }
        held = {path: set(handle.keys()) for path, handle in handles.items()}
        for name, piece in wanted.items():
            path, stored_name = stored[name]
            if stored_name not in held[path]:
                problems.append(f"{name} is not in {path.name}, where the index has it")
                continue
            found = handles[path].get_slice(stored_name)
            shape, dtype = tuple(found.get_shape()), found.get_dtype()
            if shape != piece.shape:
                problems.append(f"{name} is {list(shape)}, config.json says {list(piece.shape)}")
                continue
            types = _BYTE_TYPES if name in packed else _FLOAT_TYPES
            if dtype not in types:
                problems.append(f"{name} is {dtype}, supported are {', '.join(types)}")
            else:
                dtypes[name] = types[dtype]
    if problems:
        raise ModelError(f"{model_dir}: {_listed(problems)}; fetch the model again")
    return dtypes


def _check_tied(model_dir: Path, head: Stored, table: Stored) -> None:
    """Raise ModelError if the stored head is another matrix than the input's table, by some rows of all."""
    with _opened(head.path) as of_head, _opened(table.path) as of_table:
        if head.name not in of_head.keys():  # noqa: SIM118 - not a mapping
            raise ModelError(f"{model_dir}: {HEAD} is not in {head.path.name}, where the index has it; fetch it again")
        heads, rows = of_head.get_slice(head.name), of_table.get_slice(table.name)
        num_rows = rows.get_shape()[0]
        chosen = range(0, num_rows, -(-num_rows // COMPARED_ROWS))
        if heads.get_shape() == rows.get_shape() and all(
            torch.equal(heads[row].float(), rows[row].float()) for row in chosen
        ):
            return
    raise ModelError(
        f"{model_dir}: config.json says that {HEAD} is tied to {TABLE}, but the checkpoint holds another {HEAD}; "
        "set tie_word_embeddings to false"
    )


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
