"""Quantization of matrices when a checkpoint of 16 bits is loaded. Needs no torch."""

import math

from common.models.sizes.stacks import SCALES, Stack, Stacks

CODES = {"fp8": "float8_e4m3fn", "int8": "int8"}
"""Dtypes of codes, by the scheme's name."""
PRODUCTS = ("qkv", "gate", "o", "gate_up", "down", "q", "latent_in", "delta_in", "delta_out")
"""Names of a layer's matrices that activations are multiplied by. Other matrices stay as they are: the input's table
and the head, routers, experts, and the matrix that keys and values are expanded from latents by."""
SCALE_BYTES = 4


def quantized(stacks: Stacks, scheme: str) -> Stacks:
    """Return stacks in which each row of a layer's products is held in codes, with a scale of the row beside them."""
    changed: Stacks = {}
    for name, stack in stacks.items():
        if _is_product(name):
            changed[name] = stack._replace(dtype=CODES[scheme])
            changed[f"{name}{SCALES}"] = stack._replace(dtype="float32", is_scales=True)
        else:
            changed[name] = stack
    return changed


def is_quantized(stack: Stack) -> bool:
    """Tell whether a stack holds codes that are made when it is loaded."""
    return stack.dtype in CODES.values()


def saved_bytes(stacks: Stacks, element_bytes: int) -> int:
    """Return the bytes by which quantized stacks are smaller than with elements of `element_bytes`."""
    shapes = [stack.shape for stack in stacks.values() if is_quantized(stack)]
    return sum(math.prod(shape) * (element_bytes - 1) - shape[0] * SCALE_BYTES for shape in shapes)


def widened_bytes(stacks: Stacks) -> int:
    """Return the bytes of the largest quantized matrix in 16 bits, as steps of many tokens may hold it."""
    return max((2 * math.prod(stack.shape) for stack in stacks.values() if is_quantized(stack)), default=0)


def _is_product(name: str) -> bool:
    return name.startswith("layers.") and name.rsplit(".", 1)[1] in PRODUCTS
