"""Types of GGUF tensors: elements in blocks, each block with its own scales."""

from typing import NamedTuple


class BlockType(NamedTuple):
    """Type of a tensor: `num_elements` neighbours of a row stand in `num_bytes`."""

    name: str
    num_elements: int
    num_bytes: int

    def bytes_of(self, num_elements: int) -> int:
        """Return the bytes of whole blocks with `num_elements` in all."""
        return num_elements // self.num_elements * self.num_bytes


TYPES = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    30: BlockType("BF16", 1, 2),
}
"""Types that can be read, by their numbers in a file."""

OTHERS = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip
"""Names of types that cannot be read, for errors."""


def type_name(number: int) -> str:
    """Return a type's name, or the number of an unknown type."""
    known = TYPES.get(number)
    return known.name if known else OTHERS.get(number, f"of the unknown type {number}")
