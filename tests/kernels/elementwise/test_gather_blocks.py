"""The handoff's copy: exactly the named blocks move, byte for byte."""

import pytest
import torch
from torch import Tensor

from common.kernels.elementwise.gather_blocks import gather_blocks
from common.ops import reference


def make_pools(num_blocks: int, block_bytes: int, device: torch.device) -> tuple[Tensor, Tensor]:
    pools = torch.randint(0, 256, (2, num_blocks, block_bytes), dtype=torch.uint8)
    return pools[0].to(device), pools[1].to(device)


@pytest.mark.parametrize(
    ("block_bytes", "num_copies"), [(16, 5), (48, 1), (16384, 3), (16400, 7), (40000, 4), (147456, 2)]
)
def test_named_blocks_and_no_others_are_written(block_bytes: int, num_copies: int, device: torch.device) -> None:
    source, target = make_pools(num_copies + 6, block_bytes, device)
    source_ids = torch.randperm(num_copies + 6)[:num_copies].int().to(device)
    target_ids = torch.randperm(num_copies + 6)[:num_copies].int().to(device)
    expected = target.clone()
    reference.gather_blocks(source, source_ids, expected, target_ids)
    gather_blocks(source.data_ptr(), source_ids, target, target_ids)
    assert torch.equal(target, expected)


def test_one_source_block_may_go_to_many(device: torch.device) -> None:
    source, target = make_pools(4, 64, device)
    ids = torch.tensor([2, 2, 2], dtype=torch.int32, device=device)
    gather_blocks(source.data_ptr(), ids, target, torch.tensor([0, 3, 1], dtype=torch.int32, device=device))
    assert torch.equal(target[[0, 3, 1]], source[[2, 2, 2]])


def test_no_blocks_is_no_copy(device: torch.device) -> None:
    source, target = make_pools(2, 32, device)
    before, none = target.clone(), torch.zeros(0, dtype=torch.int32, device=device)
    gather_blocks(source.data_ptr(), none, target, none)
    assert torch.equal(target, before)


def test_what_cannot_be_copied_in_16_bytes_is_refused() -> None:
    ids = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(AssertionError, match="16"):
        gather_blocks(1024, ids, torch.zeros(2, 24, dtype=torch.uint8), ids)
    with pytest.raises(AssertionError, match="16"):
        gather_blocks(1032, ids, torch.zeros(2, 32, dtype=torch.uint8), ids)


@pytest.mark.gpu
def test_a_block_past_4_gib_is_reached(cuda: torch.device) -> None:
    block_bytes = 1 << 20
    target = torch.zeros(5000, block_bytes, dtype=torch.uint8, device=cuda)
    source = torch.randint(0, 256, (1, block_bytes), dtype=torch.uint8, device=cuda)
    zero, last = (torch.tensor([i], dtype=torch.int32, device=cuda) for i in (0, 4999))
    gather_blocks(source.data_ptr(), zero, target, last)
    assert torch.equal(target[4999], source[0])
    assert not target[:4999].any()
