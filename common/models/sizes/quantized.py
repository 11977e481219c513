"""Matrices held in 8 bits: quantized when they are loaded, or as a checkpoint has them. Needs no torch."""

import math
from collections.abc import Mapping
from typing import NamedTuple

from common.models.sizes.stacks import SCALES, Stack, Stacks

CODES = {"fp8": "float8_e4m3fn", "int8": "int8"}
"""Dtypes of codes, by the scheme's name."""
PRODUCTS = ("qkv", "gate", "o", "gate_up", "down", "q", "latent_in", "delta_in", "delta_out")
"""Names of a layer's matrices that activations are multiplied by. Other matrices stay as they are: the input's table
and the head, routers, experts, and the matrix that keys and values are expanded from latents by."""
SCALE_BYTES = 4
BLOCK = 128
"""Rows and columns of the blocks of FP8 that kernels multiply by."""


class Codes(NamedTuple):
    """Form of a matrix in 8 bits."""

    dtype: str
    rows: int  # that share a scale
    columns: int  # that share a scale; 0: all


def quantized(stacks: Stacks, scheme: str) -> Stacks:
    """Return stacks in which each row of a layer's products is held in codes, with a scale of the row beside them."""
    codes = Codes(CODES[scheme], 1, 0)
    return _in_codes(stacks, {name: codes for name in stacks if is_product(name)}, are_kept=False)


def kept(stacks: Stacks, codes: Mapping[str, Codes]) -> Stacks:
    """Return stacks of which those named in `codes` are held as the checkpoint has them, with scales beside them."""
    return _in_codes(stacks, codes, are_kept=True)


def _in_codes(stacks: Stacks, codes: Mapping[str, Codes], *, are_kept: bool) -> Stacks:
    changed: Stacks = {}
    for name, stack in stacks.items():
        changed[name] = stack
        if name in codes:
            dtype, *block = codes[name]
            changed[name] = stack._replace(dtype=dtype, keeps_codes=are_kept)
            changed[f"{name}{SCALES}"] = stack._replace(dtype="float32", scale_block=(block[0], block[1]))
    return changed


def is_quantized(stack: Stack) -> bool:
    """Tell whether a stack holds codes."""
    return stack.dtype in CODES.values()


def saved_bytes(stacks: Stacks, element_bytes: int) -> int:
    """Return the bytes by which quantized stacks are smaller than with elements of `element_bytes`."""
    num_codes = sum(math.prod(stack.shape) for stack in stacks.values() if is_quantized(stack))
    num_scales = sum(math.prod(stack.shape) for stack in stacks.values() if stack.is_scales)
    return num_codes * (element_bytes - 1) - num_scales * SCALE_BYTES


def widened_bytes(stacks: Stacks) -> int:
    """Return the bytes of the largest quantized matrix in 16 bits, as steps of many tokens may hold it."""
    return max((2 * math.prod(stack.shape) for stack in stacks.values() if is_quantized(stack)), default=0)


def is_product(name: str) -> bool:
    """Tell whether a stack is a matrix that may be held in 8 bits."""
    return name.startswith("layers.") and name.rsplit(".", 1)[1] in PRODUCTS
