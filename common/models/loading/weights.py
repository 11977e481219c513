"""Load safetensors files into stacked tensors on a device; every name and shape is checked.

A checkpoint is checked as a whole before anything is loaded: a single error names all missing, unexpected or misshapen
tensors. safetensors checks the files; `upload` reads the bytes.
"""

import hashlib
import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

import torch
from torch import Tensor

from common.base.dtypes import DTYPES
from common.base.errors import ModelError
from common.models.loading.checkpoint import listed, opened, stored_tensors
from common.models.loading.upload import Part, Progress, Upload
from common.models.quantization.found import WEIGHT, described, find_packed, matrices_of
from common.models.quantization.groups import Held
from common.models.quantization.packed_part import PackedPart, Target
from common.models.quantization.rules import Quantization
from common.models.quantization.stored import PackedMatrix, StoredTensor
from common.models.sizes.codes import FLOATS, Codes
from common.models.sizes.quantized import is_of_experts
from common.models.sizes.stacks import FACTORS, OFFSETS, SCALES, Piece, Stack, Stacks

logger = logging.getLogger(__name__)
# Buffers that old checkpoints carry although their values follow from the config.
IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)
_DTYPES = DTYPES | {"uint8": torch.uint8, "int8": torch.int8, FLOATS: torch.uint8}
_FLOAT_TYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_BYTE_TYPES = {"U8": torch.uint8}
HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"
"""Names of the matrix of logits and of the input's table; tied models have one matrix for both."""
MAYBE_ZERO = (".bias", ".weight_zero_point")
"""Ends of names of tensors that old writers of GPTQ and of compressed-tensors have for every matrix, full of zeros."""
COMPARED_ROWS = 64
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
        return self.stacks[name].form is None and _dtype_of(self.stacks[name], self.dtype) == torch.uint8

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


def load_weights(
    model_dir: Path,
    layout: WeightsLayout,
    region: Tensor,
    *,
    ignored: tuple[str, ...],
    progress: Progress,
    quantization: Quantization | None = None,
) -> Upload:
    """Begin to load and stack into a region; raises ModelError naming each missing, extra or misshapen tensor.

    Args:
        ignored: beginnings of names of checkpoint tensors that are not needed.
        quantization: what the checkpoint's configuration says of quantized matrices.
    """
    stored = stored_tensors(model_dir)
    stacks = {name: stack for name, stack in layout.stacks.items() if not stack.is_beside}
    matrices = _packed_matrices(model_dir, stacks, stored, quantization)
    stored |= {name: each[0].held[0][1] for name, each in matrices.items()}
    chosen = {name: stack.pieces_of(stored) for name, stack in stacks.items()}
    wanted = {piece.checkpoint_name: piece for pieces in chosen.values() for piece in pieces}
    _check_names(model_dir, wanted, stored, ignored, _instead(stacks.values(), stored))
    of_bytes = {piece.checkpoint_name for name, pieces in chosen.items() if layout.is_packed(name) for piece in pieces}
    plain = {name: piece for name, piece in wanted.items() if name not in matrices}
    dtypes = _check_shapes(model_dir, plain, stored, of_bytes)
    if HEAD not in wanted and HEAD in stored and TABLE in wanted:
        _check_tied(model_dir, stored[HEAD], stored[TABLE])
    tensors, parts, targets = layout.tensors(region), list[Part | PackedPart](), dict[str, list[list[Target]]]()
    for name, pieces in chosen.items():
        for piece in pieces:
            target, scales = place_in(tensors, name, stacks[name], piece)
            if piece.checkpoint_name in matrices:
                keeps_codes = stacks[name].keeps_codes
                of_piece = _targets(piece, target, scales, keeps_codes=keeps_codes)
                targets.setdefault(piece.checkpoint_name, []).append(of_piece)
                continue
            source, dtype = stored[piece.checkpoint_name], dtypes[piece.checkpoint_name]
            first_row, _ = piece.rows or (0, 0)
            offset = source.offset + first_row * math.prod(piece.shape[1:]) * dtype.itemsize
            parts.append(Part(source.path, offset, dtype, target, stacks[name].add, scales))
    for name, of_pieces in targets.items():
        for matrix, *of_matrix in zip(matrices[name], *of_pieces, strict=True):
            parts.append(PackedPart(matrix, 0, matrix.num_rows, tuple(of_matrix)))
    return Upload(parts, region.device, progress)


def _packed_matrices(
    model_dir: Path, stacks: Stacks, stored: dict[str, StoredTensor], quantization: Quantization | None
) -> dict[str, tuple[PackedMatrix, ...]]:
    """Take quantized matrices out of the stored tensors; raises ModelError for what contradicts the configuration."""
    if quantization is None:
        return {}
    found = find_packed(matrices_of(stacks), stored, quantization)
    if not found.problems and not found.matrices:
        found.problems.append(f"no tensor is quantized, and {quantization.where} says {quantization.method}")
    if found.problems:
        raise ModelError(
            f"{model_dir}: {listed(found.problems)}; do config.json and the weights belong together? "
            "Fetch the model again"
        )
    for name in found.used:
        del stored[name]
    known = {piece.checkpoint_name for stack in stacks.values() for form in stack.forms for piece in form}
    beside = {f"{name.removesuffix(WEIGHT)}{end}" for name in found.matrices for end in MAYBE_ZERO}
    for name in _zeros({name: stored[name] for name in (beside & stored.keys()) - known}):
        del stored[name]
    held, kept = {*stored, *found.matrices}, dict[str, Codes]()
    for stack in stacks.values():
        if stack.form is not None and stack.keeps_codes:
            kept |= {piece.checkpoint_name: stack.form for piece in stack.pieces_of(held)}
    logger.info("%s", described(model_dir, found, quantization, kept))
    return found.matrices


def _zeros(tensors: Mapping[str, StoredTensor]) -> Iterator[str]:
    """Yield the names of tensors without other numbers than 0; each file is opened once, since headers are long."""
    for path in {tensor.path for tensor in tensors.values()}:
        with opened(path) as handle:
            for name, tensor in tensors.items():
                if tensor.path == path and (not tensor.dtype or not handle.get_tensor(tensor.name).any()):
                    yield name


def _targets(piece: Piece, target: Tensor | Held, scales: Tensor | None, *, keeps_codes: bool) -> list[Target]:
    """Return where the rows of a quantized matrix go, or of each that a tensor has stacked.

    Args:
        target: the piece's place, in the order of the file.
        scales: that of its scales, if its rows are held in codes.
        keeps_codes: these are the checkpoint's; else rows are quantized anew.
    """
    if len(piece.shape) == 3:
        num, num_rows, width = piece.shape
        if isinstance(target, Held):
            return [Target(0, num_rows, matrix, None, keeps_codes) for matrix in target.matrices(num)]
        of_each = (None,) * num if scales is None else scales.view(num, -1, scales.shape[-1]).unbind()
        stacked = zip(target.view(num, num_rows, width).unbind(), of_each, strict=True)
        return [Target(0, num_rows, matrix, of_matrix, keeps_codes) for matrix, of_matrix in stacked]
    first_row, end = piece.rows or (0, piece.shape[0])
    if isinstance(target, Tensor) and piece.order is None:
        target = target.view(piece.stack_shape)
    return [Target(first_row, end, target, scales, keeps_codes)]


def place_in(
    tensors: Mapping[str, Tensor], name: str, stack: Stack, piece: Piece
) -> tuple[Tensor | Held, Tensor | None]:
    """Return the piece's place in the stack `name`, in the order of the file, and that of scales of rows or blocks."""
    if stack.form is None:
        return in_file_order(tensors[name], piece), None
    beside = [tensors.get(f"{name}{end}") for end in (SCALES, OFFSETS, FACTORS)]
    if stack.form.is_weight_only:
        of_piece = [None if each is None else _rows_in(each, piece) for each in (tensors[name], *beside)]
        codes, scales, offsets, factors = of_piece
        assert codes is not None and scales is not None, "codes have scales"
        return Held(codes, scales, offsets, factors, in_quarters=is_of_experts(name)), None
    scales, each = beside[0], stack.form.rows
    assert scales is not None, "codes have scales"
    scales = scales[piece.begin // each : -(-(piece.begin + piece.num_rows) // each)]
    if piece.order is None:
        return in_file_order(tensors[name], piece).view(piece.stack_shape), scales
    if each > 1 or scales.shape[1] > 1:  # of blocks, which no piece in another order has
        return in_file_order(tensors[name], piece), scales
    return in_file_order(tensors[name], piece), scales.view(*piece.order.view[:-1], 1).permute(piece.order.file)


def _rows_in(tensor: Tensor, piece: Piece) -> Tensor:
    """Return the piece's rows of codes, scales or offsets, in the order of the file: `[..., width]`."""
    rows = tensor[piece.begin : piece.begin + piece.num_rows]
    if piece.order is None:
        return rows
    return rows.view(*piece.order.view[:-1], rows.shape[1]).permute(piece.order.file)


def in_file_order(tensor: Tensor, piece: Piece) -> Tensor:
    """Return a view of the piece's place in a stack, with the elements in the order of the file."""
    rows = tensor[piece.begin : piece.begin + piece.num_rows]
    return rows.view(-1) if piece.order is None else rows.view(piece.order.view).permute(piece.order.file)


def _instead(stacks: Iterable[Stack], held: Collection[str]) -> list[str]:
    """Return names of tensors that would stand for missing ones, in the forms that a checkpoint does not have."""
    names: list[str] = []
    for stack in (stack for stack in stacks if stack.others):
        had = stack.pieces_of(held)
        if any(piece.checkpoint_name not in held for piece in had):
            others = (form for form in stack.forms if form is not had)
            names += [piece.checkpoint_name for form in others for piece in form if piece.checkpoint_name not in held]
    return names


def _check_names(
    model_dir: Path,
    wanted: Mapping[str, Piece],
    stored: Mapping[str, StoredTensor],
    ignored: tuple[str, ...],
    instead: list[str],
) -> None:
    missing = sorted(set(wanted) - set(stored))
    others = (name for name in set(stored) - set(wanted) if not name.startswith(ignored))
    extra = sorted(name for name in others if not name.endswith(IGNORED_SUFFIXES))
    problems = []
    if missing:
        problems.append(f"{len(missing)} missing tensors: {listed(missing)}")
    if missing and instead:
        problems[-1] += f"; or, in another form, {listed(instead)}"
    if extra:
        problems.append(f"{len(extra)} unexpected tensors: {listed(extra)}")
    if problems:
        raise ModelError(f"{model_dir}: {'; '.join(problems)}; do config.json and the weights belong together?")


def _check_shapes(
    model_dir: Path, wanted: Mapping[str, Piece], stored: Mapping[str, StoredTensor], packed: set[str]
) -> dict[str, torch.dtype]:
    """Return the dtypes of the wanted tensors in their files; raises ModelError naming each tensor at fault.

    Args:
        packed: names of tensors that hold bytes.
    """
    problems, dtypes = [], {}
    for name, piece in wanted.items():
        path, _, dtype, shape, _ = stored[name]
        types = _BYTE_TYPES if name in packed else _FLOAT_TYPES
        if not dtype:
            problems.append(f"{name} is not in {path.name}, where the index has it")
        elif shape != piece.shape:
            problems.append(f"{name} is {list(shape)}, config.json says {list(piece.shape)}")
        elif dtype not in types:
            problems.append(f"{name} is {dtype}, supported are {', '.join(types)}")
        else:
            dtypes[name] = types[dtype]
    if problems:
        raise ModelError(f"{model_dir}: {listed(problems)}; fetch the model again")
    return dtypes


def _check_tied(model_dir: Path, head: StoredTensor, table: StoredTensor) -> None:
    """Raise ModelError if the stored head is another matrix than the input's table, by some rows of all."""
    if not head.dtype:
        raise ModelError(f"{model_dir}: {HEAD} is not in {head.path.name}, where the index has it; fetch it again")
    with opened(head.path) as of_head, opened(table.path) as of_table:
        heads, rows = of_head.get_slice(head.name), of_table.get_slice(table.name)
        num_rows = table.shape[0]
        chosen = range(0, num_rows, -(-num_rows // COMPARED_ROWS))
        if head.shape == table.shape and all(torch.equal(heads[row].float(), rows[row].float()) for row in chosen):
            return
    raise ModelError(
        f"{model_dir}: config.json says that {HEAD} is tied to {TABLE}, but the checkpoint holds another {HEAD}; "
        "set tie_word_embeddings to false"
    )
