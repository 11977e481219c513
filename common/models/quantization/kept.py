"""Choice of the matrices that stay in a checkpoint's own codes of 8 bits, stack by stack."""

from collections.abc import Collection, Mapping

from common.models.quantization.formats import FP8, INT8, Scaled
from common.models.quantization.stored import PackedMatrix
from common.models.sizes.quantized import BLOCK, CODES, Codes, is_product
from common.models.sizes.stacks import Piece, Stacks

Matrices = Mapping[str, tuple[PackedMatrix, ...]]
DTYPES: dict[tuple[str, ...], str] = {FP8: CODES["fp8"], INT8: CODES["int8"]}


def kept_codes(stacks: Stacks, stored: Collection[str], matrices: Matrices) -> dict[str, Codes]:
    """Return the forms of stacks of products whose pieces all have the same format, if kernels take it.

    Args:
        stored: names of the checkpoint's tensors.
        matrices: quantized matrices by the names of plain ones.
    """
    held, found = {*stored, *matrices}, dict[str, Codes]()
    for name, stack in stacks.items():
        if is_product(name) and (codes := _codes(stack.pieces_of(held), matrices)):
            found[name] = codes
    return found


def _codes(pieces: list[Piece], matrices: Matrices) -> Codes | None:
    """Return the form in which a stack of pieces is held; None if the stack is made plain."""
    if any(piece.order is not None or piece.checkpoint_name not in matrices for piece in pieces):
        return None
    format_, *others = (matrices[piece.checkpoint_name][0].format for piece in pieces)
    if not isinstance(format_, Scaled) or any(other != format_ for other in others) or format_.has_zeros:
        return None
    if any(isinstance(each, Scaled) and each.input_bits != 8 for each in (format_, *others)):
        return None
    dtype, block = DTYPES[format_.codes], (format_.rows, format_.columns)
    if block in ((0, 0), (1, 0)):
        return Codes(dtype, 1, 0)
    if block != (BLOCK, BLOCK) or format_.codes != FP8:
        return None
    is_even = all(piece.begin % BLOCK == (piece.rows or (0, 0))[0] % BLOCK == 0 for piece in pieces)
    return Codes(dtype, BLOCK if is_even else 1, BLOCK)
