"""Blocks of GGUF tensors as integers in groups, by the names of their types.

A function takes the bytes of blocks `[blocks, bytes of a block]` and returns `Groups` with a row for each block. Their
elements are the same as ggml's to the last bit, because products and sums are in fp32 and in the order of its code.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from common.checkpoint.gguf.block_types import BlockType
from common.models.quantization.groups import Groups

Unpack = Callable[[Tensor], Groups]

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Types without blocks."""
SUPER = 256
"""Elements of a block of the K types."""


def _half(blocks: Tensor, at: int) -> Tensor:
    """Return the float16 at byte `at` of each block, as fp32 `[blocks, 1]`."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """Return all low halves of the bytes of a row, then all high halves: `[..., bytes]` to `[..., 2 * bytes]`."""
    return torch.cat([packed & 0x0F, packed >> 4], -1)


def _fifth_bits(blocks: Tensor, at: int) -> Tensor:
    """Return 16 for each set bit of four bytes, 0 for the others: `[blocks, 32]`."""
    places = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    return ((blocks[:, at : at + 4, None] >> places) & 1).flatten(1) << 4


def _around(numbers: Tensor, middle: int) -> Tensor:
    """Return numbers from 0 on as signed ones around 0."""
    return numbers.view(torch.int8) - middle


def _q8_0(blocks: Tensor) -> Groups:
    return Groups(blocks[:, None, 2:].contiguous().view(torch.int8), _half(blocks, 0))


def _q4_0(blocks: Tensor) -> Groups:
    return Groups(_around(_nibbles(blocks[:, None, 2:]), 8), _half(blocks, 0))


def _q4_1(blocks: Tensor) -> Groups:
    return Groups(_around(_nibbles(blocks[:, None, 4:]), 0), _half(blocks, 0), _half(blocks, 2))


def _q5_0(blocks: Tensor) -> Groups:
    codes = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2)
    return Groups(_around(codes[:, None], 16), _half(blocks, 0))


def _q5_1(blocks: Tensor) -> Groups:
    codes = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4)
    return Groups(_around(codes[:, None], 0), _half(blocks, 0), _half(blocks, 2))


def _scales_and_mins(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return scales and minimums of the eight groups of 32 elements of Q4_K and Q5_K: `[blocks, 8]` each.

    Both have six bits. The first four have a byte each, whose two upper bits belong to the last four.
    """
    first, second, rest = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat([first & 0x3F, (rest & 0x0F) | ((first >> 6) << 4)], -1)
    mins = torch.cat([second & 0x3F, (rest >> 4) | ((second >> 6) << 4)], -1)
    return _half(blocks, 0) * scales.float(), _half(blocks, 2) * mins.float()


def _q4_k(blocks: Tensor) -> Groups:
    scales, mins = _scales_and_mins(blocks)
    codes = _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).view(-1, 8, 32)
    return Groups(_around(codes, 0), scales, -mins)


def _q5_k(blocks: Tensor) -> Groups:
    scales, mins = _scales_and_mins(blocks)
    places = torch.arange(8, dtype=torch.uint8, device=blocks.device).view(8, 1)
    fifth = ((blocks[:, None, 16:48] >> places) & 1) << 4
    codes = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).view(-1, 8, 32) | fifth
    return Groups(_around(codes, 0), scales, -mins)


def _q6_k(blocks: Tensor) -> Groups:
    scales = _half(blocks, 208) * blocks[:, 192:208].contiguous().view(torch.int8).float()
    places = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device).view(4, 1)
    upper = ((blocks[:, 128:192].reshape(-1, 2, 1, 32) >> places) & 3) << 4
    codes = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).view(-1, 2, 4, 32) | upper
    return Groups(_around(codes.view(-1, 16, 16), 32), scales)


UNPACKED: dict[str, Unpack] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}

HALVES = {
    "Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2),
    "Q6_K": (208,),
}  # fmt: skip
"""Bytes of a block at which its scale in float16 begins, and its minimum or their scale."""
NOT_FINITE = 0x7C00
"""Exponent of a float16 that is infinite or not a number."""


def bad_block(blocks: Tensor, type_: BlockType) -> int | None:
    """Return the first of some blocks `[bytes]`, in host memory, with a float16 that is not finite; None for none."""
    words = blocks.view(torch.int16).view(-1, type_.num_bytes // 2) if type_.name in HALVES else blocks
    for at in HALVES.get(type_.name, ()):
        exponents = words[:, at // 2] & NOT_FINITE
        if exponents.max() == NOT_FINITE:
            return int(exponents.argmax())
    return None
