"""Codes of a block become the tall operand of `wgmma` where they are: run on a CPU, by instructions and layouts."""

import pytest
import torch
from torch import Tensor

from common.kernels.products.tiles.packed_floats import SHIFTED_BACK, floating
from common.kernels.products.tiles.packed_operands import codes_layout, constraints, scaling, widening, words_layout
from common.ops.base import float_elements, pack, scale_bytes
from tests.kernels.products.rounding import rounding
from tests.kernels.warp import held, run

TYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
LANES = torch.arange(32)
CHUNK, ROW = LANES % 4, LANES // 4


def _in_warp(bases: list[list[int]], warp: int) -> Tensor:
    """Return the first place of a warp, in each dimension."""
    return torch.tensor(bases[0]) * (warp & 1) + torch.tensor(bases[1]) * (warp >> 1)


def _words(numbers: Tensor, warp: int) -> Tensor:
    """Return a warp's words of a block `[64, 32]` of numbers, two of which make one: `[32, 8]`, four of each row."""
    layout = codes_layout()
    first = _in_warp(layout.warp_bases, warp)
    places = held(layout.reg_bases, layout.lane_bases, [64, 32]) + first[0] * 32 + first[1]
    registers = numbers.flatten()[places]
    return registers[:, 0::2] | registers[:, 1::2] << 16


def _halves(bits: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Return the two numbers of a register."""
    return [(bits >> 16 * one & 0xFFFF).to(torch.int32).to(torch.int16).view(dtype) for one in range(2)]


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize(("bits", "middle"), [(4, 0), (4, 8), (8, 0)])
def test_a_thread_has_its_elements_of_its_products(name: str, bits: int, middle: int) -> None:
    """Of a fragment of 16 columns, lane `4 * g + t` has columns `2 * t`, `2 * t + 1`, and 8 further on, of two rows."""
    torch.manual_seed(5)
    low, high, dtype = (0, 16, torch.uint8) if bits == 4 else (-128, 128, torch.int8)
    codes = torch.randint(low, high, (64, 512 // bits))
    numbers = pack(codes.to(dtype)).view(torch.int16).long() & 0xFFFF  # [64, 32]
    for warp in range(4):
        words = _words(numbers, warp)
        for word in range(8):  # four of a row, then four of the row 8 further down
            pairs = run(widening(name, bits, middle), 16 // bits, [words[:, word]])
            row = 16 * warp + ROW + 8 * (word // 4)
            for pair, register in enumerate(pairs):
                column = 128 // bits * (word % 4) + 8 * pair + 2 * CHUNK
                for one, half in enumerate(_halves(register, TYPES[name])):
                    assert torch.equal(half.long(), codes[row, column + one] - middle)


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize(("bits", "groups"), [(4, 4), (4, 2), (4, 1), (8, 4), (8, 2), (8, 1)])
@pytest.mark.parametrize("has_offsets", [False, True])
def test_elements_are_rounded_once(name: str, bits: int, groups: int, has_offsets: bool) -> None:
    """By scales and offsets that a thread holds beside its words; every code is there."""
    torch.manual_seed(6)
    low, high, dtype = (0, 16, torch.uint8) if bits == 4 else (-128, 128, torch.int8)
    columns = 512 // bits
    codes = torch.arange(low, high).repeat(64 * columns // (high - low))[torch.randperm(64 * columns)].view(64, columns)
    numbers = pack(codes.to(dtype)).view(torch.int16).long() & 0xFFFF
    scales = (10.0 ** (torch.rand(64, groups) * 3 - 4)).half().double()
    offsets = torch.randn(64, groups).half().double() / 8 if has_offsets else torch.zeros(64, groups).double()
    middle = 8 if bits == 4 and not has_offsets else 0
    scale, offset = (each.repeat_interleave(columns // groups, 1) for each in (scales, offsets))
    elements, bound = (codes - middle) * scale + offset, rounding(codes - middle, scale, offset, bits, TYPES[name])
    layout = words_layout(groups)
    for warp in range(4):
        words, first = _words(numbers, warp), _in_warp(layout.warp_bases, warp)
        places = held(layout.reg_bases, layout.lane_bases, list(layout.shape)) + first[0] * 32
        beside = [
            each[:, None, :, None, None].expand(64, 4, groups, 4 // groups, 2).flatten()[places]
            for each in (scales, offsets)
        ]
        for word in range(8):
            both = slice(2 * word, 2 * word + 2)  # numbers of the word
            inputs = [words[:, word], *beside[0][:, both].unbind(1)]
            inputs += beside[1][:, both].unbind(1) if has_offsets else []
            pairs = 16 // bits
            assert len(constraints(bits, has_scales=True, has_offsets=has_offsets).split(",")) == pairs + len(inputs)
            row = 16 * warp + ROW + 8 * (word // 4)
            code = scaling(name, bits, has_offsets=has_offsets)
            for pair, register in enumerate(run(code, pairs, inputs, in_fp32=True)):
                column = columns // 4 * (word % 4) + 8 * pair + 2 * CHUNK
                for one, half in enumerate(_halves(register, TYPES[name])):
                    place = row, column + one
                    assert ((half.double() - elements[place]).abs() <= bound[place]).all()  # NaN fails


@pytest.mark.parametrize("name", TYPES)
def test_floats_are_exact_where_a_thread_has_them(name: str) -> None:
    torch.manual_seed(7)
    codes, scales = torch.randint(0, 16, (64, 128)), torch.randint(13 * 8, 31 * 8 - 1, (64, 8)).to(torch.uint8)
    elements = float_elements(codes, scales, torch.full((64, 1), 1 / SHIFTED_BACK.value))
    packed = pack(codes.to(torch.uint8)).view(torch.int16).long() & 0xFFFF
    layout, (code, constraints) = words_layout(4), floating(name, 2)
    numbers = scales.view(torch.uint16).long()[:, None, :, None, None].expand(64, 4, 4, 1, 2).flatten()
    for warp in range(4):
        words, first = _words(packed, warp), _in_warp(layout.warp_bases, warp)
        places = held(layout.reg_bases, layout.lane_bases, list(layout.shape)) + first[0] * 32
        for word in range(8):
            inputs = [words[:, word], *numbers[places][:, 2 * word : 2 * word + 2].unbind(1)]
            assert len(constraints.split(",")) == 4 + len(inputs)
            row = 16 * warp + ROW + 8 * (word // 4)
            for pair, register in enumerate(run(code, 4, inputs)):
                column = 32 * (word % 4) + 8 * pair + 2 * CHUNK
                for one, half in enumerate(_halves(register, TYPES[name])):
                    assert torch.equal(half.float(), elements[row, column + one])


@pytest.mark.parametrize("name", TYPES)
def test_every_float_with_every_scale_is_exact(name: str) -> None:
    """Scales of e4m3, and the powers of two of MXFP4 down to the least that is held."""
    scales = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    scales = torch.cat((scales, 2.0 ** torch.arange(-16, 9)))
    for code in range(16):
        for lanes in scales.split(32):
            lanes = torch.nn.functional.pad(lanes, (0, 32 - len(lanes)), value=1.0)
            least, greatest = scale_bytes(lanes).long(), scale_bytes(lanes.flip(0)).long()
            word = torch.full((32,), code * 0x11111111)
            value = float_elements(torch.tensor([[code]]), scale_bytes(torch.ones(1, 1)), torch.ones(1, 1)).item()
            for pair, register in enumerate(run(floating(name)[0], 4, [word, least | greatest << 8])):
                expected = value * (lanes if pair < 2 else lanes.flip(0)) / SHIFTED_BACK.value
                for half in _halves(register, TYPES[name]):
                    assert torch.equal(half.float(), expected)
