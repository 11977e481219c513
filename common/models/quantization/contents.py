"""Contents of small tensors, which decide the form in which integers are held. Needs no torch."""

import math
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from common.base.errors import ModelError
from common.models.quantization.formats import Format
from common.models.quantization.stored import PackedMatrix, StoredTensor
from common.models.quantization.words import WORD_BITS, Awq, Gptq, PackedRows

Numbers: TypeAlias = NDArray[Any]
TYPES = {"F16": np.float16, "F32": np.float32, "I32": np.int32, "I8": np.int8, "U8": np.uint8, "F8_E8M0": np.uint8}
"""Types of numpy by their names in safetensors, which has bfloat16 besides; exponents of 8 bits are bytes."""
ORDERS, ZEROS, SCALES = ("g_idx", "weight_g_idx"), ("qzeros", "weight_zero_point"), ("scales", "weight_scale", "s")
"""Names of tensors, behind the module's."""


def is_ordered(matrix: PackedMatrix) -> bool:
    """Tell whether neighbouring columns have a group in common, whatever table of groups there is."""
    table, scales = _tensor(matrix, ORDERS), _tensor(matrix, SCALES)
    if table is None or scales is None:
        return True
    groups = numbers(table).ravel()
    num_groups = scales.shape[0] if table.name.endswith(".g_idx") else math.prod(scales.shape[1:])
    if groups[0] < 0:
        return True  # no table
    return matrix.width % num_groups == 0 and np.array_equal(
        groups, np.arange(matrix.width) // (matrix.width // num_groups)
    )


def has_offsets(matrix: PackedMatrix) -> bool:
    """Tell whether a code other than the middle one means 0 in some group."""
    zeros = _tensor(matrix, ZEROS)
    if zeros is None:
        return False
    middle = _middle_word(matrix.format)
    return bool((numbers(zeros) != middle).any())


def _middle_word(format_: Format) -> int:
    """Return a word of zeros that are all the middle code, as a file has them."""
    if not isinstance(format_, PackedRows | Awq | Gptq):
        return 0
    bits = format_.bits if isinstance(format_, PackedRows | Gptq) else 4
    middle = 2 ** (bits - 1) - (isinstance(format_, Gptq) and format_.less_one)
    word: int = sum(middle << place for place in range(0, WORD_BITS, bits))
    return word - 2**WORD_BITS if word >= 2 ** (WORD_BITS - 1) else word


def fits_float16(matrix: PackedMatrix) -> bool:
    """Tell whether float16 holds each scale exactly."""
    scales = _tensor(matrix, SCALES)
    if scales is None or scales.dtype == "F16":
        return scales is not None
    exact = numbers(scales)
    with np.errstate(over="ignore"):
        return np.array_equal(exact.astype(np.float16).astype(np.float32), exact)


def spans_exponents(matrix: PackedMatrix, most: int) -> bool:
    """Tell whether powers of two in a row span more than `most` neighbouring exponents somewhere."""
    scales = _tensor(matrix, SCALES)
    assert scales is not None, "scales are needed"
    exponents = numbers(scales)
    return bool((np.ptp(exponents, axis=1) >= most).any())


def _tensor(matrix: PackedMatrix, names: tuple[str, ...]) -> StoredTensor | None:
    return next((stored for field, stored in matrix.held if field.name in names), None)


def numbers(stored: StoredTensor) -> Numbers:
    """Return a tensor's numbers, those of bfloat16 in fp32; raises ModelError for a file that ends early."""
    is_bfloat16 = stored.dtype == "BF16"
    kind = np.dtype(np.uint16 if is_bfloat16 else TYPES[stored.dtype])
    try:
        found = np.fromfile(stored.path, kind, math.prod(stored.shape), offset=stored.offset)
    except OSError as error:
        raise ModelError(f"{stored.path}: {error.strerror}; fetch the model again") from None
    if found.size < math.prod(stored.shape):
        raise ModelError(f"{stored.path}: ends within {stored.name}; fetch the model again")
    found = found.reshape(stored.shape)
    return (found.astype(np.uint32) << 16).view(np.float32) if is_bfloat16 else found
