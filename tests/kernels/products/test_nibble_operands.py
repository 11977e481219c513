"""Codes of a block become the tall operand of `wgmma` where they are: run on a CPU, by instructions and layout."""

import pytest
import torch

from common.kernels.products.tiles.nibble_operands import codes_layout, widening
from common.ops.base import pack
from tests.kernels.warp import held, run

TYPES = {"bf16": torch.bfloat16, "f16": torch.float16}


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("middle", [0, 8])
def test_a_thread_has_its_elements_of_eight_products(name: str, middle: int) -> None:
    """Of a fragment of 16 columns, lane `4 * g + t` has columns `2 * t`, `2 * t + 1`, and 8 further on, of two rows."""
    torch.manual_seed(5)
    codes, layout = torch.randint(0, 16, (64, 128)), codes_layout()
    numbers = pack(codes.to(torch.uint8)).view(torch.int16).long() & 0xFFFF  # [64, 32]
    lanes = torch.arange(32)
    g, t = lanes // 4, lanes % 4
    for warp in range(4):
        first = torch.tensor(layout.warp_bases[0]) * (warp & 1) + torch.tensor(layout.warp_bases[1]) * (warp >> 1)
        places = held(layout.reg_bases, layout.lane_bases, [64, 32]) + first[0] * 32 + first[1]
        registers = numbers.flatten()[places]  # two make a word, as instructions take them
        words = registers[:, 0::2] | registers[:, 1::2] << 16
        for word in range(8):  # four of a row, then four of the row 8 further down
            pairs = run(widening(name, middle), 4, [words[:, word]])
            row = 16 * warp + g + 8 * (word // 4)
            for pair, bits in enumerate(pairs):
                column = 32 * (word % 4) + 8 * pair + 2 * t
                for one in range(2):
                    half = (bits >> 16 * one & 0xFFFF).to(torch.int32).to(torch.int16).view(TYPES[name])
                    assert torch.equal(half.long(), codes[row, column + one] - middle)
