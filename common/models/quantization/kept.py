"""Choice of the matrices that stay in a checkpoint's own codes, stack by stack. Needs no torch.

Inputs of dense products in 8 bits are quantized, so a checkpoint must be made for that. Those of experts, and of codes
in groups, stay as they are.
"""

import math
from collections.abc import Collection, Iterable, Mapping

from common.models.quantization.contents import fits_float16, has_offsets, is_ordered, spans_exponents
from common.models.quantization.formats import FP8, INT8, Scaled
from common.models.quantization.fp4 import Mxfp4, Nvfp4
from common.models.quantization.stored import PackedMatrix
from common.models.quantization.words import Awq, Gptq, Marlin, PackedRows
from common.models.sizes.codes import BLOCK, FLOATS, PAIRS, Codes
from common.models.sizes.quantized import HEAD, is_of_experts, is_product, with_whole_experts
from common.models.sizes.stacks import Piece, Stack, Stacks

Matrices = Mapping[str, tuple[PackedMatrix, ...]]
DTYPES: dict[tuple[str, ...], str] = {FP8: "float8_e4m3fn", INT8: "int8"}
LEAST_GROUPS = {PAIRS: 32, "int8": 16}
"""Columns of the smallest group that products of integers take, by the dtype of codes."""
MULTIPLES = {PAIRS: BLOCK, "int8": 64, FLOATS: BLOCK}
"""Columns of which a row of codes has a multiple, and a large group too unless it is the row."""

OF_FLOATS = Codes(FLOATS, 1, 16, "uint8", factor_dtype="float32")
"""Form of NVFP4, and of MXFP4, whose groups of 32 columns become two."""
EXPONENTS = 25
"""Neighbouring exponents of powers of two in a row that this form holds exactly, for products in float16, too."""


def kept_codes(stacks: Stacks, stored: Collection[str], matrices: Matrices) -> dict[str, Codes]:
    """Return the forms of stacks that are held in codes: products all of whose pieces one form holds.

    A head stays in groups alone, because codes of 8 bits would quantize its inputs, too.

    Args:
        stored: names of the checkpoint's tensors.
        matrices: quantized matrices by the names of plain ones.
    """
    held, found = {*stored, *matrices}, dict[str, Codes]()
    for name, stack in stacks.items():
        if (is_product(name) or name == HEAD) and (form := _form(name, stack, stack.pieces_of(held), matrices)):
            found[name] = form
    return with_whole_experts(found)


def _form(name: str, stack: Stack, pieces: list[Piece], matrices: Matrices) -> Codes | None:
    """Return the form in which a stack of pieces is held; None if the stack is made plain."""
    if any(_is_reordered(piece) or piece.checkpoint_name not in matrices for piece in pieces):
        return None
    of_pieces = [matrices[piece.checkpoint_name][0] for piece in pieces]
    codes = None if name == HEAD else _codes(pieces, of_pieces, of_experts=is_of_experts(name))
    if codes is not None or any(piece.order is not None for piece in pieces):
        return codes
    return held_in_groups(name, stack, map(_in_groups, of_pieces))


def _codes(pieces: list[Piece], matrices: list[PackedMatrix], *, of_experts: bool) -> Codes | None:
    """Return the form of codes of 8 bits for inputs of 8 bits, or for experts; None for others."""
    format_, *others = (matrix.format for matrix in matrices)
    if not isinstance(format_, Scaled) or any(other != format_ for other in others) or format_.has_zeros:
        return None
    inputs = {each.input_bits for each in (format_, *others) if isinstance(each, Scaled)}
    if inputs != {8} and not of_experts:
        return None
    dtype, block = DTYPES[format_.codes], (format_.rows, format_.columns)
    if block in ((0, 0), (1, 0)):
        return Codes(dtype, 1, 0)
    if block != (BLOCK, BLOCK) or format_.codes != FP8:
        return None
    return Codes(dtype, BLOCK if all(map(_has_whole_blocks, pieces)) else 1, BLOCK)


def _is_reordered(piece: Piece) -> bool:
    """Tell whether a checkpoint has the elements of a piece in another order than the stack."""
    return piece.order is not None and piece.order.file != tuple(sorted(piece.order.file))


def _has_whole_blocks(piece: Piece) -> bool:
    """Tell whether a piece begins with a block of rows, as each matrix does that a tensor has stacked."""
    stacked_rows = 0 if piece.order is None else piece.order.view[-2]
    return piece.begin % BLOCK == (piece.rows or (0, 0))[0] % BLOCK == stacked_rows % BLOCK == 0


def _in_groups(matrix: PackedMatrix) -> Codes | None:
    """Return the narrowest form of codes in groups that holds a matrix, or None.

    Columns must be in order. Offsets are products of a zero and a scale, which float16 would round.
    """
    match matrix.format:
        case Gptq(bits=bits, group=group) | PackedRows(bits=bits, group=group):
            dtype = PAIRS if bits == 4 else "int8"
        case Awq(group=group) | Marlin(group=group):
            dtype = PAIRS
        case Nvfp4():
            return OF_FLOATS
        case Mxfp4():
            return None if spans_exponents(matrix, EXPONENTS) else OF_FLOATS
        case Scaled(codes=codes, rows=0 | 1, columns=group) if codes == INT8:
            dtype = "int8"
        case _:
            return None
    if not is_ordered(matrix):
        return None
    if has_offsets(matrix):
        return Codes(dtype, 1, group or matrix.width, "float32", "float32")
    return Codes(dtype, 1, group or matrix.width, "float16" if fits_float16(matrix) else "float32")


def held_in_groups(name: str, stack: Stack, forms: Iterable[Codes | None]) -> Codes | None:
    """Return the form in groups that holds the matrices of a stack, or None; of experts only integers of 4 bits."""
    form = widest(forms, stack.elements[1])
    return None if form is not None and form.dtype != PAIRS and is_of_experts(name) else form


def widest(forms: Iterable[Codes | None], width: int) -> Codes | None:
    """Return a form in groups that holds matrices of several, or None; rows are of `width` elements.

    Floats and integers have none in common.
    """
    found = list(forms)
    if not found or any(form is None for form in found):
        return None
    each = [form for form in found if form is not None]
    if any(form.dtype == FLOATS for form in each):
        return each[0] if len(set(each)) == 1 and width % MULTIPLES[FLOATS] == 0 else None
    dtype = PAIRS if all(form.dtype == PAIRS for form in each) else "int8"
    common = math.gcd(width, *(form.columns for form in each))
    multiple = MULTIPLES[dtype]
    columns = common if common == width or common % multiple == 0 else math.gcd(common, BLOCK)
    if columns < LEAST_GROUPS[dtype] or width % multiple:
        return None
    scale_dtype = max((form.scale_dtype for form in each), key=("float16", "float32").index)
    return Codes(dtype, 1, columns, scale_dtype, scale_dtype if any(form.offset_dtype for form in each) else "")
