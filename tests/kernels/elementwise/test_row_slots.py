"""Slots of a decode step: what block tables say, -1 for padding, whose table is not even read."""

import pytest
import torch

from common.kernels.elementwise.row_slots import row_slots
from common.ops import reference


@pytest.mark.parametrize("num_rows", [1, 3, 127, 128, 129, 300])
@pytest.mark.parametrize("block_size", [1, 16, 48])
def test_slots_are_the_references(num_rows: int, block_size: int, device: torch.device) -> None:
    max_blocks = 7
    seq_lens = torch.randint(1, max_blocks * block_size + 1, (num_rows,), dtype=torch.int32)
    seq_lens[torch.rand(num_rows) < 0.3] = 0
    positions = (seq_lens - 1).clamp(min=0)
    tables = torch.randint(1 << 30, (num_rows, max_blocks), dtype=torch.int32)  # slots exceed int32
    used = torch.arange(max_blocks).expand(num_rows, -1) == (positions // block_size).unsqueeze(1)
    expected = reference.row_slots(positions, seq_lens, tables, block_size)
    tables[~used] = -1
    slots = row_slots(positions.to(device), seq_lens.to(device), tables.to(device), block_size)
    assert slots.dtype == torch.int64
    assert torch.equal(slots.cpu(), expected)


def test_rows_of_padding_may_say_anything(device: torch.device) -> None:
    positions = torch.full((5,), 1 << 30, dtype=torch.int32, device=device)
    seq_lens = torch.zeros(5, dtype=torch.int32, device=device)
    tables = torch.zeros((5, 2), dtype=torch.int32, device=device)
    assert row_slots(positions, seq_lens, tables, 16).tolist() == [-1] * 5


def test_no_rows_have_no_slots(device: torch.device) -> None:
    none = torch.zeros(0, dtype=torch.int32, device=device)
    assert row_slots(none, none, torch.zeros((0, 4), dtype=torch.int32, device=device), 16).shape == (0,)
