"""Load a GGUF file's tensors into stacked tensors on a device; every name and shape is checked.

The file is checked as a whole before anything is loaded. `place_of` says which tensor has the rows of a stack, and
`UNPACKED` makes their blocks plain.
"""

import logging
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from common.base.errors import ModelError
from common.checkpoint.gguf.config import ROPE_FACTORS, architecture_of
from common.checkpoint.gguf.header import StoredTensor
from common.checkpoint.gguf.model_file import GGUFModel, read_gguf
from common.models.gguf.block_part import BlockPart
from common.models.gguf.names import Place, place_of, turned_back
from common.models.gguf.unpacking import PLAIN, UNPACKED
from common.models.loading.checkpoint import listed
from common.models.loading.upload import Part, Progress, Upload
from common.models.loading.weights import WeightsLayout, place_in
from common.models.quantization.groups import Held
from common.models.sizes.quantized import is_quantized
from common.models.sizes.stacks import Piece, Stack

logger = logging.getLogger(__name__)


class _Wanted(NamedTuple):
    """Rows of a stack, and their place in the file."""

    stack: str
    piece: Piece
    place: Place


def load_gguf_weights(
    path: Path, layout: WeightsLayout, region: Tensor, *, head_dim: int, progress: Progress
) -> Upload:
    """Begin to load and stack into a region; raises ModelError naming each missing, extra or misshapen tensor.

    Args:
        head_dim: of queries and keys, whose rows some files have in another order.
    """
    model = read_gguf(path)
    wanted = _wanted(layout, head_dim if architecture_of(model).turns_neighbours else 0)
    _check_names(model, wanted)
    _check_shapes(model, wanted)
    tensors = layout.tensors(region)
    logger.info("%s", _described(model, layout))
    parts = []
    for name, piece, place in wanted:
        stack = layout.stacks[name]
        parts.append(_part(place, _matrix(model.tensors, place), *place_in(tensors, name, stack, piece), stack))
    return Upload(parts, region.device, progress)


def _wanted(layout: WeightsLayout, turned_dim: int) -> list[_Wanted]:
    """Return all pieces; heads of `turned_dim` stand in the file as neighbours that turn together, unless it is 0."""
    wanted = []
    for name, stack in layout.stacks.items():
        for piece in () if stack.is_beside else stack.pieces:
            placed = turned_back(piece, turned_dim) if turned_dim else piece
            wanted.append(_Wanted(name, placed, place_of(piece.checkpoint_name)))
    return wanted


def _check_names(model: GGUFModel, wanted: list[_Wanted]) -> None:
    names = {each.place.name for each in wanted}
    missing = sorted(names - model.tensors.keys())
    extra = sorted(model.tensors.keys() - names - {ROPE_FACTORS})
    problems = [
        f"{len(found)} {what} tensors: {listed(found)}"
        for what, found in (("missing", missing), ("unexpected", extra))
        if found
    ]
    if problems:
        raise ModelError(f"{model.path}: {'; '.join(problems)}; serve another file of this model")


def _check_shapes(model: GGUFModel, wanted: list[_Wanted]) -> None:
    problems = {}
    for _, piece, place in wanted:
        stored = model.tensors[place.name]
        shape = stored.shape if place.expert is None else stored.shape[1:]
        if shape != piece.shape or (place.expert is not None and place.expert >= stored.shape[0]):
            problems[place.name] = f"{place.name} is {list(stored.shape)}, the metadata says {list(piece.shape)}"
            if place.expert is not None:
                problems[place.name] += " for each expert"
    if problems:
        raise ModelError(f"{model.path}: {listed(list(problems.values()))}; serve another file of this model")


def _described(model: GGUFModel, layout: WeightsLayout) -> str:
    """Return a line about the types of a file's tensors, and what becomes of them."""
    count = Counter(tensor.type.name for tensor in model.tensors.values())
    num_bytes = sum(tensor.num_bytes for tensor in model.tensors.values())
    types = ", ".join(f"{number} tensors in {name}" for name, number in count.most_common())
    num_packed = sum(len(stack.pieces) for stack in layout.stacks.values() if is_quantized(stack) and stack.keeps_codes)
    end = "" if count.keys() <= PLAIN.keys() else "; blocks are made plain as they are loaded"
    if num_packed:
        end = f"; {num_packed} matrices stay packed, other blocks are made plain as they are loaded"
    return f"{model.path}: {types}, {num_bytes / 1e9:.2f} GB{end}"


def _matrix(tensors: Mapping[str, StoredTensor], place: Place) -> StoredTensor:
    """Return the tensor at a place, of a stacked one the expert's matrix."""
    stored = tensors[place.name]
    if place.expert is None:
        return stored
    one = stored._replace(shape=stored.shape[1:])
    return one._replace(begin=stored.begin + place.expert * one.num_bytes)


def _part(
    place: Place, stored: StoredTensor, target: Tensor | Held, scales: Tensor | None, stack: Stack
) -> Part | BlockPart:
    kind, unpack = stored.type, UNPACKED.get(stored.type.name)
    if unpack is None:
        return Part(stored.path, stored.begin, PLAIN[kind.name], target, stack.add, scales)
    return BlockPart(stored.path, stored.begin, kind, unpack, target, stack.add, scales, place.name, stack.keeps_codes)
