"""A warp's instructions for a block of codes, run on a CPU in the kernel's layouts: each code meets its token once."""

import pytest
import torch
from torch import Tensor

from common.kernels.products.tiles.nibble_mma import multiplying, operands, summing, widening
from common.kernels.products.tiles.nibbles import layouts
from common.ops.base import pack
from tests.kernels.warp import held, run

TYPES = {"bf16": (torch.bfloat16, 128.0), "f16": (torch.float16, 1024.0)}


def _bits(tensor: Tensor, *shape: int) -> Tensor:
    """Return memory as words."""
    return tensor.view(torch.int32).view(shape).long() & 0xFFFFFFFF


def _registers(tensor: Tensor, places: Tensor) -> list[Tensor]:
    """Return what lanes hold of a tensor, register by register."""
    return list(tensor.flatten()[places].unbind(1))


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("sums", [1, 4])
@pytest.mark.parametrize("has_offsets", [False, True])
@pytest.mark.parametrize("is_lone", [False, True])
def test_a_block_and_8_tokens(name: str, sums: int, has_offsets: bool, is_lone: bool) -> None:
    torch.manual_seed(3)
    (dtype, power), tile, token = TYPES[name], layouts(1).tile, layouts(1).token
    codes, x = torch.randint(0, 16, (16, 128)), torch.randn(1 if is_lone else 8, 128).to(dtype)
    scales, offsets = torch.rand(2, 16, sums, dtype=torch.double) + 0.5
    before = torch.randn(16, 8, dtype=torch.double)
    excess = power + (0.0 if has_offsets else 8.0)
    places = held(tile.reg_bases, tile.lane_bases, [8, 4, 4])  # row of a half, chunk, word

    sides = [_registers(half, places) for half in _bits(pack(codes.to(torch.uint8)), 2, 8, 4, 4)]
    pairs = [[run(widening(name), 4, [word]) for word in side] for side in sides]
    in_order = [side[word][pair] for side in pairs for pair in range(4) for word in range(4)]
    if is_lone:  # [groups / 2, groups of two, chunk, pair], permuted as the kernel does
        memory = _bits(x, 1, 2, 2, 4, 4).permute(0, 4, 3, 1, 2)
        tokens = _registers(memory, held(token.reg_bases, token.lane_bases, [1, 4, 4, 2, 2]))
    else:  # [token, group, pair, chunk]
        groups = _bits(x, 8, 4, 4, 4).transpose(2, 3).unbind(1)
        tokens = [each for group in groups for each in _registers(group, places)]

    def of_rows(numbers: Tensor) -> list[Tensor]:
        halves = numbers.view(2, 8, 1, sums).expand(2, 8, 4, sums).expand(2, 8, 4, 4)
        return [each for half in halves for each in _registers(half, places)]

    def of_results(results: Tensor) -> Tensor:  # [half, row, two tokens, token] to [row, chunk, half and token]
        return torch.stack(_registers(results.view(2, 8, 4, 2).permute(1, 2, 0, 3), places))

    inputs = [*in_order, *tokens, *run(summing(name, sums), 4 * sums, tokens), *of_results(before)]
    inputs += of_rows(scales) + (of_rows(offsets) if has_offsets else [])
    code = multiplying(name, sums, excess, has_offsets=has_offsets, is_lone=is_lone)
    results = torch.stack(run(code, 4, inputs))
    assert len(operands(sums, has_offsets=has_offsets)[1].split(",")) == 4 + len(inputs)

    elements = scales.repeat_interleave(128 // sums, 1) * (codes - (0 if has_offsets else 8))
    elements = elements + (offsets.repeat_interleave(128 // sums, 1) if has_offsets else 0)
    expected = of_results(before + elements @ x.double().expand(8, 128).t())
    if is_lone:
        expected[1::2] = of_results(before)[1::2]  # as the first and the third
    torch.testing.assert_close(results, expected, rtol=0, atol=1e-8)
