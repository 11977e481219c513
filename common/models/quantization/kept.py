"""Choice of the matrices that stay in a checkpoint's own codes of 8 bits, stack by stack.

Inputs of dense products are quantized, so a checkpoint must be made for that. Those of experts stay as they are.
"""

from collections.abc import Collection, Mapping

from common.models.quantization.formats import FP8, INT8, Scaled
from common.models.quantization.stored import PackedMatrix
from common.models.sizes.quantized import BLOCK, CODES, EXPERTS, Codes, is_of_experts, is_product
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
        pieces, of_experts = stack.pieces_of(held), is_of_experts(name)
        if is_product(name) and (codes := _codes(pieces, matrices, of_experts=of_experts)):
            found[name] = codes
    return {name: codes for name, codes in found.items() if not is_of_experts(name) or _is_whole(name, found)}


def _is_whole(name: str, found: Collection[str]) -> bool:
    """Tell whether all matrices of a layer's experts are found."""
    return all(f"{name.rpartition('.')[0]}.{each}" in found for each in EXPERTS)


def _codes(pieces: list[Piece], matrices: Matrices, *, of_experts: bool) -> Codes | None:
    """Return the form in which a stack of pieces is held; None if the stack is made plain."""
    if any(_is_reordered(piece) or piece.checkpoint_name not in matrices for piece in pieces):
        return None
    format_, *others = (matrices[piece.checkpoint_name][0].format for piece in pieces)
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
