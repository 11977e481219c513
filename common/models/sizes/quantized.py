"""Matrices held in codes: quantized when they are loaded, or as a checkpoint has them. Needs no torch."""

import math
from collections.abc import Mapping

from common.models.sizes.codes import BLOCK, ITEM_BYTES, PAIRS, Codes, Role
from common.models.sizes.stacks import OFFSETS, SCALES, Stack, Stacks

SCHEMES = {
    "fp8": Codes("float8_e4m3fn", 1, 0),
    "int8": Codes("int8", 1, 0),
    "int4": Codes(PAIRS, 1, BLOCK, "float16"),
}
"""Forms in which rows are held that are quantized at load, by the choice's name."""
HEAD, TABLE = "lm_head", "embed"
"""Names of the matrix of logits and of the input's table."""
HEAD_PART = 16 * 1024 * 1024
"""Elements of a head that a step of many tokens widens at once."""
PRODUCTS = ("qkv", "gate", "o", "gate_up", "down", "q", "latent_in", "delta_in", "delta_out")
"""Names of a layer's matrices that activations are multiplied by. Other matrices stay as they are: the input's table
and the head, routers, experts, and the matrix that keys and values are expanded from latents by."""


def quantized(stacks: Stacks, scheme: str) -> Stacks:
    """Return stacks in which each row of a layer's products is held in codes, with scales beside them.

    Rows that are no multiple of a form's groups stay plain.
    """
    form = SCHEMES[scheme]
    products = [name for name, stack in stacks.items() if is_product(name) and _fits(stack, form)]
    return _in_codes(stacks, dict.fromkeys(products, form), are_kept=False)


def _fits(stack: Stack, form: Codes) -> bool:
    return not form.is_integers or stack.elements[1] % form.columns == 0


def kept(stacks: Stacks, codes: Mapping[str, Codes]) -> Stacks:
    """Return stacks of which those named in `codes` are held as the checkpoint has them, with scales beside them.

    A head in codes may be the table of a tied model, which is held besides.
    """
    if HEAD in codes and HEAD not in stacks:
        stacks = stacks | {HEAD: stacks[TABLE]}
    return _in_codes(stacks, codes, are_kept=True)


def _in_codes(stacks: Stacks, forms: Mapping[str, Codes], *, are_kept: bool) -> Stacks:
    changed: Stacks = {}
    for name, stack in stacks.items():
        changed[name] = stack
        if name in forms:
            changed |= _held(name, stack._replace(keeps_codes=are_kept), forms[name])
    return changed


def _held(name: str, stack: Stack, form: Codes) -> Stacks:
    """Return the tensors that hold a matrix in a form."""
    roles = {name: Role.CODES, f"{name}{SCALES}": Role.SCALES}
    if form.offset_dtype:
        roles[f"{name}{OFFSETS}"] = Role.OFFSETS
    return {each: stack._replace(dtype=form.dtype_of(role), form=form, role=role) for each, role in roles.items()}


def is_quantized(stack: Stack) -> bool:
    """Tell whether a stack holds codes."""
    return stack.form is not None and stack.role is Role.CODES


def saved_bytes(stacks: Stacks, element_bytes: int) -> int:
    """Return the bytes by which quantized stacks are smaller than with elements of `element_bytes`."""
    held = [(stack, stack.form.dtype_of(stack.role)) for stack in stacks.values() if stack.form is not None]
    plain_bytes = sum(math.prod(stack.elements) * element_bytes for stack, _ in held if is_quantized(stack))
    return plain_bytes - sum(math.prod(stack.shape) * ITEM_BYTES[dtype] for stack, dtype in held)


def widened_bytes(stacks: Stacks) -> int:
    """Return the bytes of the largest quantized matrix in 16 bits, as steps of many tokens may hold it.

    A head is widened in parts.
    """
    held = {name: math.prod(stack.elements) for name, stack in stacks.items() if is_quantized(stack)}
    return 2 * max((min(size, HEAD_PART) if name == HEAD else size for name, size in held.items()), default=0)


def is_product(name: str) -> bool:
    """Tell whether a stack is a matrix that may be held in codes."""
    return name.startswith("layers.") and name.rsplit(".", 1)[1] in PRODUCTS
