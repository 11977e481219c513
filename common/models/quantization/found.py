"""Quantized matrices among a checkpoint's tensors: what the file holds decides, and the configuration must agree."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from common.models.quantization.contents import is_ordered
from common.models.quantization.formats import Field, Format
from common.models.quantization.rules import Quantization, formats_of
from common.models.quantization.stored import ITEM_BYTES, OF_CACHE, PackedMatrix, StoredTensor
from common.models.sizes.codes import Codes
from common.models.sizes.stacks import Stacks

WEIGHT = ".weight"
FLOATS = ("BF16", "F16", "F32")
BESIDE = re.compile(
    r"\.(input_scale|activation_scale|input_global_scale|input_zero_point"
    r"|\w+_proj_activation_scale|[qkv]_scale|[kv]_proj\.output_scale|[kv]_zero_point|kv_scale|prob_output_scale|workspace)$"
)
"""Tensors beside quantized matrices that are not needed: scales of activations, and of keys and values in the cache."""
OF_INPUTS = (".input_scale", ".activation_scale")
"""Ends of names of scales of activations, one for all tokens."""
EXPERTS = ".experts."
"""Part of the names of matrices of experts."""
RARELY_LISTED = ("embed", "lm_head", "router")
"""Names of a model's matrices that are plain in most quantized checkpoints, whether or not a configuration says so."""
CODES = ("weight", "weight_packed", "qweight", "B")
"""Names of the tensor that has a matrix's codes or plain elements."""


class Wanted(NamedTuple):
    """A matrix that a model has, or equally large ones stacked in a tensor."""

    name: str  # of the tensor, if it is plain
    num_rows: int
    width: int
    may_be_plain: bool  # whatever a configuration says: tables, heads and routers, which are rarely listed
    num_stacked: int = 0  # 0: the tensor is a matrix

    @property
    def module(self) -> str:
        return self.name.removesuffix(WEIGHT)

    def stored_as(self, field: str) -> str:
        """Return the name of a tensor of the matrix in a checkpoint."""
        return f"{self.name}{field.removeprefix('weight')}" if self.num_stacked else f"{self.module}.{field}"

    def shapes(self, field: Field) -> list[tuple[int, ...]]:
        """Return the shapes that a tensor of the matrix may have, the usual first."""
        stacked = (self.num_stacked,) if self.num_stacked else ()
        return [(*stacked, *shape) for shape in (field.shape, *field.others)]


def matrices_of(stacks: Stacks) -> Iterator[Wanted]:
    """Yield the matrices that checkpoints may have quantized, in all forms, once each."""
    seen = set[str]()
    for key, stack in stacks.items():
        for piece in (piece for form in stack.forms for piece in form):
            name, shape, order = piece.checkpoint_name, piece.shape, piece.order
            if name in seen:
                continue
            seen.add(name)
            if name.endswith(WEIGHT) and len(shape) == 2:
                yield Wanted(name, *shape, key.rpartition(".")[2] in RARELY_LISTED)
            elif len(shape) == 3 and order is not None and order.file == tuple(sorted(order.file)):
                yield Wanted(name, *shape[1:], may_be_plain=True, num_stacked=shape[0])


class Found(NamedTuple):
    """Quantized matrices by the names that they would have if they were plain, and all tensors that they consist of."""

    matrices: dict[str, tuple[PackedMatrix, ...]]  # one, or all that a tensor has stacked
    used: set[str]
    problems: list[str]


def find_packed(wanted: Iterable[Wanted], stored: Mapping[str, StoredTensor], quantization: Quantization) -> Found:
    """Return the quantized matrices; problems name each contradiction, missing tensor, wrong shape and wrong type."""
    found = Found({}, {name for name in stored if BESIDE.search(name)}, [])
    wanted = list(wanted)
    all_held = [
        {name: stored[each.stored_as(name)] for name in CODES if each.stored_as(name) in stored} for each in wanted
    ]
    names = [_names(each.module, held.values()) for each, held in zip(wanted, all_held, strict=True)]
    for each, held, format_ in zip(wanted, all_held, formats_of(quantization, names), strict=True):
        if not held or _is_plain(held):
            if held and format_ is not None and not (each.may_be_plain or quantization.is_loose):
                found.problems.append(_contradiction(each.module, held, quantization, format_))
            continue
        if format_ is None or not _agrees(held, format_, each):
            found.problems.append(_contradiction(each.module, held, quantization, format_))
            continue
        _add(found, each, format_, stored)
    return found


def _names(module: str, held: Iterable[StoredTensor]) -> set[str]:
    """Return the names by which a configuration may know a module, whatever model it stands in."""
    in_file = {name for stored in held for name in (stored.name, stored.name.rpartition(".")[0])}
    inner = module.removeprefix("model.")
    return {module, f"model.language_model.{inner}", f"language_model.{module}", *in_file}


def _is_plain(held: Mapping[str, StoredTensor]) -> bool:
    return all(name == "weight" and stored.dtype in FLOATS for name, stored in held.items())


def _agrees(held: Mapping[str, StoredTensor], format_: Format, wanted: Wanted) -> bool:
    """Tell whether the codes are those of a format."""
    try:
        codes, *_ = format_.fields(wanted.num_rows, wanted.width)
    except ValueError:
        return True  # and the size is a problem of its own
    return all(name in codes.names and stored.dtype in codes.dtypes for name, stored in held.items())


def _contradiction(
    module: str, held: Mapping[str, StoredTensor], quantization: Quantization, format_: Format | None
) -> str:
    has = " and ".join(f"{name} in {stored.dtype}" for name, stored in held.items())
    said = format_.label if format_ is not None else "no quantization"
    return f"{module} has {has}, and {quantization.where.rpartition('/')[2]} says {said}"


def _add(found: Found, wanted: Wanted, format_: Format, stored: Mapping[str, StoredTensor]) -> None:
    """Add a matrix, or what is wrong with it."""
    try:
        fields = format_.fields(wanted.num_rows, wanted.width)
    except ValueError as error:
        found.problems.append(f"{wanted.module}: {error}")
        return
    held, problems = list[tuple[Field, StoredTensor]](), list[str]()
    for field in fields:
        names = [name for name in map(wanted.stored_as, field.names) if name in stored]
        found.used.update(names)
        if names:
            held.append((field, stored[names[0]]))
            problems += _wrong(names[0], wanted.shapes(field), field.dtypes, stored[names[0]])
        elif not field.is_optional:
            problems.append(f"{wanted.stored_as(field.name)} is missing, which {format_.label} needs")
    found.problems.extend(problems)
    if not problems:
        found.matrices[wanted.name] = _divided(wanted, format_, held)


def _divided(wanted: Wanted, format_: Format, held: list[tuple[Field, StoredTensor]]) -> tuple[PackedMatrix, ...]:
    """Return a matrix, or those that its tensors have stacked."""
    name, num_rows, width, _, num_stacked = wanted
    if not num_stacked:
        return (PackedMatrix(name, format_, num_rows, width, tuple(held)),)
    return tuple(
        PackedMatrix(f"{name}[{number}]", format_, num_rows, width, tuple(_part(*each, number) for each in held))
        for number in range(num_stacked)
    )


def _part(field: Field, stored: StoredTensor, number: int) -> tuple[Field, StoredTensor]:
    """Return the part of stacked tensors that one matrix has."""
    num_bytes = math.prod(field.shape) * ITEM_BYTES[stored.dtype]
    return field, stored._replace(shape=field.shape, offset=stored.offset + number * num_bytes)


def _wrong(name: str, shapes: list[tuple[int, ...]], dtypes: tuple[str, ...], stored: StoredTensor) -> Iterator[str]:
    """Yield what is wrong with a tensor."""
    if not stored.dtype:
        yield f"{name} is not in {stored.path.name}, where the index has it"
    elif stored.shape not in shapes:
        yield f"{name} is {list(stored.shape)}, its format and config.json say {list(shapes[0])}"
    elif stored.dtype not in dtypes:
        yield f"{name} is {stored.dtype}, supported are {', '.join(dtypes)}"


def described(model_dir: Path, found: Found, quantization: Quantization, kept: Mapping[str, Codes]) -> str:
    """Return a line about the quantized matrices of a checkpoint, of which those in `kept` stay in these forms."""
    matrices = [matrix for each in found.matrices.values() for matrix in each]
    count = Counter(matrix.format.label for matrix in matrices)
    num_kept = sum(len(found.matrices[each]) for each in kept)
    num_bytes = sum(matrix.num_bytes for matrix in matrices)
    line = f"{model_dir}: " + ", ".join(f"{number} matrices in {label}" for label, number in count.items())
    line += f", {num_bytes / 1e9:.2f} GB, "
    num_packed = sum(form.is_weight_only for form in kept.values())
    if num_in_8_bits := num_kept - num_packed:
        line += f"{num_in_8_bits} of {len(matrices)} matrices stay in 8 bits, and inputs are quantized token by token"
        line += ", but for those of experts" if any(EXPERTS in name for name in kept) else ""
        if any(name.endswith(OF_INPUTS) for name in found.used):
            line += ", without the scales for inputs that the checkpoint has"
    if num_packed:
        line += ("; " if num_in_8_bits else "") + f"{num_packed} of {len(matrices)} matrices stay packed"
    if num_kept < len(matrices):
        line += "; others are made plain as they are loaded" if kept else "are made plain as they are loaded"
        if scattered := sum(not is_ordered(each) for each in matrices if each.name not in kept):
            line += f", {scattered} of them because their columns are in any order (act order)"
    if quantization.input_bits < 16 and not kept:
        line += f"; activations stay in 16 bits or more, although the checkpoint was made for {quantization.input_bits}"
    if quantization.kv_cache or any(OF_CACHE.search(name) for name in found.used):
        line += "; its scales of keys and values are for kv.dtype = fp8"
    return line
