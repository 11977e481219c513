"""A warp's instructions for a block of codes, run on a CPU in the kernel's layouts: each code meets its token once."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from common.kernels.products.tiles.packed_floats import SHIFTED_BACK, floating
from common.kernels.products.tiles.packed_mma import EXCESS, adding, multiplying, operands, summing, widening
from common.kernels.products.tiles.packed_operands import scaling
from common.kernels.products.tiles.packed_tiles import layouts
from common.ops.base import float_elements, pack
from tests.kernels.warp import held, run

TYPES = {"bf16": torch.bfloat16, "f16": torch.float16}


def _bits(tensor: Tensor, *shape: int) -> Tensor:
    """Return memory as words."""
    return tensor.view(torch.int32).view(shape).long() & 0xFFFFFFFF


def _registers(tensor: Tensor, places: Tensor) -> list[Tensor]:
    """Return what lanes hold of a tensor, register by register."""
    return list(tensor.flatten()[places].unbind(1))


def _codes(bits: int, columns: int) -> Tensor:
    """Codes of 16 rows, the least and the largest among them."""
    if bits == 4:
        return torch.randint(0, 16, (16, columns))
    codes = torch.randint(-128, 128, (16, columns))
    codes[:, 5], codes[:, 14] = -128, 127
    return codes


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("sums", [1, 4])
@pytest.mark.parametrize("has_offsets", [False, True])
@pytest.mark.parametrize("is_lone", [False, True])
def test_a_block_and_8_tokens(name: str, bits: int, sums: int, has_offsets: bool, is_lone: bool) -> None:
    torch.manual_seed(3)
    dtype, tile, token = TYPES[name], layouts(1, bits).tile, layouts(1, bits).token
    columns, middle = 512 // bits, 0 if bits == 8 or has_offsets else 8
    codes, x = _codes(bits, columns), torch.randn(1 if is_lone else 8, columns).to(dtype)
    scales, offsets = torch.rand(2, 16, sums, dtype=torch.double) + 0.5
    before = torch.randn(16, 8, dtype=torch.double)
    excess = EXCESS[name] + middle if bits == 4 else 0.0
    places = held(tile.reg_bases, tile.lane_bases, [8, 4, 4])  # row of a half, chunk, word

    packed = pack(codes.to(torch.uint8 if bits == 4 else torch.int8))
    sides = [_registers(half, places) for half in _bits(packed, 2, 8, 4, 4)]
    pairs = [[run(widening(name, bits), 16 // bits, [word]) for word in side] for side in sides]
    in_order = [side[word][pair] for side in pairs for pair in range(len(side[0])) for word in range(4)]
    if is_lone:  # [groups of 64 columns, two of 32, chunk, pair], permuted as the kernel does
        memory = _bits(x, 1, columns // 64, 2, 4, 4).permute(0, 4, 3, 1, 2)
        tokens = _registers(memory, held(token.reg_bases, token.lane_bases, [1, 4, 4, columns // 64, 2]))
    else:  # [token, group, pair, chunk]
        groups = _bits(x, 8, columns // 32, 4, 4).transpose(2, 3).unbind(1)
        tokens = [each for group in groups for each in _registers(group, places)]

    def of_rows(numbers: Tensor) -> list[Tensor]:
        halves = numbers.view(2, 8, 1, sums).expand(2, 8, 4, sums).expand(2, 8, 4, 4)
        return [each for half in halves for each in _registers(half, places)]

    def of_results(results: Tensor) -> Tensor:  # [half, row, two tokens, token] to [row, chunk, half and token]
        return torch.stack(_registers(results.view(2, 8, 4, 2).permute(1, 2, 0, 3), places))

    has_sums = bool(excess) or has_offsets
    inputs = [*in_order, *tokens]
    inputs += run(summing(name, bits, sums), 4 * sums, tokens) if has_sums else []
    inputs += [*of_results(before), *of_rows(scales), *(of_rows(offsets) if has_offsets else [])]
    code = multiplying(name, bits, sums, excess, has_offsets=has_offsets, is_lone=is_lone)
    results = torch.stack(run(code, 4, inputs))
    assert len(operands(bits, sums, has_sums=has_sums, has_offsets=has_offsets)[1].split(",")) == 4 + len(inputs)

    elements = scales.repeat_interleave(columns // sums, 1) * (codes - middle)
    elements = elements + (offsets.repeat_interleave(columns // sums, 1) if has_offsets else 0)
    expected = of_results(before + elements @ x.double().expand(8, columns).t())
    if is_lone:
        expected[1::2] = of_results(before)[1::2]  # as the first and the third
    torch.testing.assert_close(results, expected, rtol=0, atol=1e-8)


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("has_offsets", [False, True])
def test_elements_of_a_block_and_8_tokens(name: str, bits: int, has_offsets: bool) -> None:
    """By scales and offsets of words that leave elements exact in 16 bits."""
    torch.manual_seed(4)
    dtype, columns = TYPES[name], 512 // bits
    codes, x, before = _codes(bits, columns), torch.randn(8, columns).to(dtype), torch.randn(16, 8, dtype=torch.double)
    scales = 2.0 ** torch.randint(-3, 4, (2, 8, 1, 4)).double().expand(2, 8, 4, 4)
    offsets = (scales * torch.randint(-16, 1, (2, 8, 1, 4))).double() if has_offsets else None
    if bits == 8 and has_offsets:
        codes = codes // 2  # 8 bits with the offset
    packed = pack(codes.to(torch.uint8 if bits == 4 else torch.int8))
    code = scaling(name, bits, has_offsets=has_offsets, numbers=1)
    beside = [scales] if offsets is None else [scales, offsets]
    found, of_results = _added(code, name, bits, [_bits(packed, 2, 8, 4, 4), *beside], x, before)
    scale, offset = (
        torch.zeros(16, columns).double()
        if each is None
        else each[:, :, 0].reshape(16, 4).repeat_interleave(columns // 4, 1)
        for each in (scales, offsets)
    )
    elements = (codes - (8 if bits == 4 and not has_offsets else 0)) * scale + offset
    torch.testing.assert_close(found, of_results(before + elements @ x.double().t()), rtol=0, atol=1e-8)


@pytest.mark.parametrize("name", TYPES)
def test_floats_of_a_block_and_8_tokens(name: str) -> None:
    """By the scales of both groups of each word, all of which differ."""
    torch.manual_seed(5)
    codes, x, before = torch.randint(0, 16, (16, 128)), torch.randn(8, 128).to(TYPES[name]), torch.randn(16, 8)
    scales = (13 * 8 + torch.randperm(16 * 8)).view(16, 8).to(torch.uint8)
    words = _bits(pack(codes.to(torch.uint8)), 2, 8, 4, 4)
    numbers = scales.view(torch.uint16).long().view(2, 8, 1, 4).expand(2, 8, 4, 4)
    code, constraints = floating(name)
    assert len(constraints.split(",")) == 6
    found, of_results = _added(code, name, 4, [words, numbers], x, before.double())
    elements = float_elements(codes, scales, torch.full((16, 1), 1 / SHIFTED_BACK.value))
    expected = before.double() + elements.double() @ x.double().t()
    torch.testing.assert_close(found, of_results(expected), rtol=0, atol=1e-8)


def _added(
    code: str, name: str, bits: int, operands: list[Tensor], x: Tensor, before: Tensor
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Return results of a warp that widens words by what is beside them, and what takes a lane's share of a matrix.

    Args:
        operands: words first, `[2, 8, 4, 4]` each: half, row, chunk, word.
    """
    places = held(layouts(1, bits).tile.reg_bases, layouts(1, bits).tile.lane_bases, [8, 4, 4])
    sides = [
        [
            run(code, 16 // bits, list(each), in_fp32=True)
            for each in zip(*(_registers(operand[half], places) for operand in operands), strict=True)
        ]
        for half in range(2)
    ]
    inputs = [side[word][pair] for side in sides for pair in range(16 // bits) for word in range(4)]
    groups = _bits(x, 8, x.shape[1] // 32, 4, 4).transpose(2, 3).unbind(1)
    inputs += [each for group in groups for each in _registers(group, places)]

    def of_results(results: Tensor) -> Tensor:
        return torch.stack(_registers(results.view(2, 8, 4, 2).permute(1, 2, 0, 3), places))

    add, constraints = adding(name, bits)
    inputs += list(of_results(before))
    assert len(constraints.split(",")) == 4 + len(inputs)
    return torch.stack(run(add, 4, inputs)), of_results


@pytest.mark.parametrize("name", TYPES)
def test_every_code_of_8_bits_is_exact(name: str) -> None:
    codes = torch.arange(-128, 128).to(torch.int8).view(4, 64)  # of as many lanes as there are columns, in two turns
    for lanes in _bits(codes, 4, 16).flatten().unflatten(0, (2, 32)):
        pairs = run(widening(name, 8), 2, [lanes])
        for byte in range(4):  # those of a pair are two bytes apart
            half = pairs[byte % 2] >> 16 * (byte // 2) & 0xFFFF
            found = half.to(torch.int32).to(torch.int16).view(TYPES[name]).long()
            expected = (lanes >> 8 * byte & 0xFF).to(torch.uint8).view(torch.int8).long()
            assert torch.equal(found, expected)
