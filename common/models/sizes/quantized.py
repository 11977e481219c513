"""Matrices held in codes: quantized when they are loaded, or as a checkpoint has them. Needs no torch."""

import math
from collections.abc import Mapping

from common.models.sizes.codes import BLOCK, ITEM_BYTES, PAIRS, Codes, Role
from common.models.sizes.stacks import FACTORS, OFFSETS, SCALES, Stack, Stacks

SCHEMES = {
    "fp8": Codes("float8_e4m3fn", 1, 0),
    "int8": Codes("int8", 1, 0),
    "int4": Codes(PAIRS, 1, BLOCK, "float16"),
}
"""Forms in which rows are held that are quantized at load, by the choice's name."""
EXPERTS = ("experts_gate_up", "experts_down")
"""Names of the matrices of a layer's experts, whose inputs are not quantized."""
HEAD, TABLE = "lm_head", "embed"
"""Names of the matrix of logits, which has a choice of its own, and of the input's table."""
PRODUCTS = ("qkv", "gate", "o", "gate_up", "down", "q", "latent_in", "delta_in", "delta_out", *EXPERTS)
"""Names of a layer's matrices that activations are multiplied by. Other matrices stay as they are: the input's table
and the head, routers, and the matrix that keys and values are expanded from latents by."""


def quantized(stacks: Stacks, scheme: str) -> Stacks:
    """Return stacks in which each row of a layer's products is held in codes, with scales beside them.

    Rows that are no multiple of a form's groups stay plain.
    """
    form = SCHEMES[scheme]
    products = [name for name, stack in stacks.items() if is_product(name) and _fits(stack, form)]
    return _in_codes(stacks, with_whole_experts(dict.fromkeys(products, form)), are_kept=False)


def _fits(stack: Stack, form: Codes) -> bool:
    """Tell whether rows are groups of a form, and stand in the file as rows, whatever form it has of the stack."""
    if not form.is_weight_only:
        return True
    orders = (piece.order for pieces in stack.forms for piece in pieces if piece.order is not None)
    return stack.elements[-1] % form.columns == 0 and all(each.file[-1] == len(each.view) - 1 for each in orders)


def with_whole_experts(forms: Mapping[str, Codes]) -> dict[str, Codes]:
    """Return forms without those of experts in whose layer another matrix of experts has none, or other codes."""

    def is_whole(name: str) -> bool:
        of_layer = [forms.get(f"{name.rpartition('.')[0]}.{each}") for each in EXPERTS]
        kinds = {each.has_pairs and each.dtype for each in of_layer if each is not None}  # those of 8 bits go together
        return None not in of_layer and len(kinds) == 1

    return {name: form for name, form in forms.items() if not is_of_experts(name) or is_whole(name)}


def with_head(stacks: Stacks, scheme: str) -> Stacks:
    """Return stacks in which each row of the head is held in codes."""
    return _in_codes(stacks, {HEAD: SCHEMES[scheme]}, are_kept=False)


def kept(stacks: Stacks, codes: Mapping[str, Codes]) -> Stacks:
    """Return stacks of which those named in `codes` are held as the checkpoint has them, with scales beside them."""
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
    if form.factor_dtype:
        roles[f"{name}{FACTORS}"] = Role.FACTORS
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

    Matrices of experts are widened in registers, and a head in parts.
    """
    narrow = (stack for name, stack in stacks.items() if name != HEAD and not is_of_experts(name))
    return max((2 * math.prod(stack.elements) for stack in filter(is_quantized, narrow)), default=0)


def widening_bytes(stacks: Stacks, element_bytes: int) -> int:
    """Return the bytes moved to make a layer's codes in groups plain, with elements of `element_bytes`.

    Codes, and what lies beside them, are read, and elements are written; products read these as they read plain
    matrices. Codes of experts are widened in registers.
    """
    grouped = {name: each for name, each in stacks.items() if each.form and each.form.is_weight_only}
    grouped = {name: each for name, each in grouped.items() if not (name.startswith(HEAD) or is_of_experts(name))}
    elements = sum(math.prod(stack.elements) for stack in filter(is_quantized, grouped.values()))
    return 2 * element_bytes * elements - saved_bytes(grouped, element_bytes)


def is_product(name: str) -> bool:
    """Tell whether a stack is a matrix that may be held in codes."""
    return name.startswith("layers.") and name.rsplit(".", 1)[1] in PRODUCTS


def is_of_experts(name: str) -> bool:
    """Tell whether a stack is of the matrices of a layer's experts, or lies beside one."""
    return name.removesuffix(SCALES).removesuffix(OFFSETS).removesuffix(FACTORS).rpartition(".")[2] in EXPERTS
