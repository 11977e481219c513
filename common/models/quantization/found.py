"""Quantized matrices among a checkpoint's tensors: what the file holds decides, and the configuration must agree."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from common.models.quantization.dequantize import TYPES
from common.models.quantization.formats import Field, Format
from common.models.quantization.packed_part import PackedMatrix, StoredTensor
from common.models.quantization.rules import Quantization

WEIGHT = ".weight"
FLOATS = ("BF16", "F16", "F32")
BESIDE = re.compile(
    r"\.(input_scale|activation_scale|input_global_scale|input_zero_point"
    r"|[qkv]_scale|[kv]_proj\.output_scale|[kv]_zero_point|kv_scale|prob_output_scale|workspace)$"
)
"""Tensors beside quantized matrices that are not needed: scales of activations, and of keys and values in the cache."""
OF_CACHE = re.compile(r"\.([kv]_scale|[kv]_proj\.output_scale|kv_scale)$")
"""Scales of keys and values in the cache."""
CODES = ("weight", "weight_packed", "qweight", "B")
"""Names of the tensor that has a matrix's codes or plain elements."""


class Wanted(NamedTuple):
    """A matrix that a model has."""

    module: str
    num_rows: int
    width: int
    may_be_plain: bool  # whatever a configuration says: tables, heads and routers, which are rarely listed


class Found(NamedTuple):
    """Quantized matrices by the names that they would have if they were plain, and all tensors that they consist of."""

    matrices: dict[str, PackedMatrix]
    used: set[str]
    problems: list[str]


def find_packed(wanted: Iterable[Wanted], stored: Mapping[str, StoredTensor], quantization: Quantization) -> Found:
    """Return the quantized matrices; problems name each contradiction, missing tensor, wrong shape and wrong type."""
    found = Found({}, {name for name in stored if BESIDE.search(name)}, [])
    for each in wanted:
        held = {name: stored[f"{each.module}.{name}"] for name in CODES if f"{each.module}.{name}" in stored}
        format_ = quantization.format_of(_names(each.module, held.values()))
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
    in_file = {stored.name.rpartition(".")[0] for stored in held}
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
    module, num_rows, width, _ = wanted
    try:
        fields = format_.fields(num_rows, width)
    except ValueError as error:
        found.problems.append(f"{module}: {error}")
        return
    held, problems = list[tuple[Field, StoredTensor]](), list[str]()
    for field in fields:
        names = [name for name in (f"{module}.{each}" for each in field.names) if name in stored]
        found.used.update(names)
        if names:
            held.append((field, stored[names[0]]))
            problems += _wrong(names[0], field, stored[names[0]])
        elif not field.is_optional:
            problems.append(f"{module}.{field.name} is missing, which {format_.label} needs")
    found.problems.extend(problems)
    found.matrices[f"{module}{WEIGHT}"] = PackedMatrix(f"{module}{WEIGHT}", format_, num_rows, width, tuple(held))


def _wrong(name: str, field: Field, stored: StoredTensor) -> Iterator[str]:
    """Yield what is wrong with a tensor."""
    if not stored.dtype:
        yield f"{name} is not in {stored.path.name}, where the index has it"
    elif stored.shape != field.shape and stored.shape not in field.others:
        yield f"{name} is {list(stored.shape)}, its format and config.json say {list(field.shape)}"
    elif stored.dtype not in field.dtypes:
        yield f"{name} is {stored.dtype}, supported are {', '.join(field.dtypes)}"


def described(model_dir: Path, found: Found, quantization: Quantization) -> str:
    """Return a line about the quantized matrices of a checkpoint."""
    count = Counter(matrix.format.label for matrix in found.matrices.values())
    num_bytes = sum(
        math.prod(stored.shape) * TYPES[stored.dtype].itemsize
        for matrix in found.matrices.values()
        for _, stored in matrix.held
    )
    line = f"{model_dir}: " + ", ".join(f"{number} matrices in {label}" for label, number in count.items())
    line += f", {num_bytes / 1e9:.2f} GB, are made plain as they are loaded"
    if quantization.input_bits < 16:
        line += f"; activations stay in 16 bits or more, although the checkpoint was made for {quantization.input_bits}"
    if quantization.kv_cache or any(OF_CACHE.search(name) for name in found.used):
        line += "; its scales of keys and values are ignored"
    return line
