"""Forms in which blocks of GGUF tensors are held as integers in groups. Needs no torch."""

from collections.abc import Mapping

from common.checkpoint.gguf.header import StoredTensor
from common.models.gguf.names import place_of
from common.models.quantization.kept import held_in_groups
from common.models.sizes.codes import PAIRS, Codes
from common.models.sizes.quantized import HEAD, TABLE, is_product, with_whole_experts
from common.models.sizes.stacks import Stack, Stacks

HALF = "float16"
FORMS = {
    "Q4_0": Codes(PAIRS, 1, 32, HALF),
    "Q4_1": Codes(PAIRS, 1, 32, HALF, HALF),
    "Q4_K": Codes(PAIRS, 1, 32, HALF, HALF),
    "Q5_0": Codes("int8", 1, 32, HALF),
    "Q5_1": Codes("int8", 1, 32, HALF, HALF),
    "Q5_K": Codes("int8", 1, 32, HALF, HALF),
    "Q6_K": Codes("int8", 1, 16, HALF),
    "Q8_0": Codes("int8", 1, 32, HALF),
}
"""Forms by type. Scales and minimums of the K types are products of a float16 and six or eight bits, so float16 rounds
them to 11 bits. Of other types float16 holds them exactly."""


def kept_blocks(stacks: Stacks, tensors: Mapping[str, StoredTensor]) -> dict[str, Codes]:
    """Return the forms of stacks that are held in codes: products and the head whose blocks one form holds.

    A head that is the input's table is held beside it, because a step reads all of it, and only few rows of the table.
    """
    chosen = {name: stack for name, stack in stacks.items() if name == HEAD or is_product(name)}
    chosen.setdefault(HEAD, stacks[TABLE])
    found = {name: _form(name, stack, tensors) for name, stack in chosen.items()}
    return with_whole_experts({name: form for name, form in found.items() if form is not None})


def _form(name: str, stack: Stack, tensors: Mapping[str, StoredTensor]) -> Codes | None:
    names = [place_of(piece.checkpoint_name).name for piece in stack.pieces]
    forms = (FORMS.get(tensors[name].type.name) if name in tensors else None for name in names)
    return held_in_groups(name, stack, forms)
