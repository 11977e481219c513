"""The host's changes: exactly the named rows and entries are written, also when rows change places."""

import dataclasses

import pytest
import torch
from torch import Tensor

from common.kernels.operands import RowState, RowUpdates, SamplingTensors
from common.kernels.update_rows import update_rows
from common.ops import reference


def make_state(max_rows: int, max_blocks: int) -> RowState:
    def ints(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.randint(1 << 30, shape, dtype=dtype)

    sampling = SamplingTensors(
        temperature=torch.randn(max_rows),
        top_k=ints(max_rows),
        top_p=torch.randn(max_rows),
        min_p=torch.randn(max_rows),
        seed=ints(max_rows, dtype=torch.int64),
    )
    return RowState(ints(max_rows), ints(max_rows), ints(max_rows), ints(max_rows, max_blocks), sampling)


def make_updates(state: RowState, num_rows: int, num_entries: int) -> RowUpdates:
    """Random rows, every other one with a token from a random row, and random distinct entries."""
    max_rows = state.token_ids.shape[0]
    seeds = torch.randint(-(2**63), 2**63 - 1, (num_rows,))
    rows, sources = torch.randperm(max_rows)[:num_rows], torch.randperm(max_rows)[:num_rows]
    sources[::2] = -1
    wholes = [rows, sources, *torch.randint(1 << 30, (3, num_rows))]
    wholes[3][::3] = 0  # cleared
    places = torch.randperm(state.block_tables.numel())[:num_entries]
    blocks = torch.randint(1 << 30, (num_entries,))
    words = [seeds.view(torch.int32), *(column.int() for column in wholes), torch.rand(3 * num_rows).view(torch.int32)]
    return RowUpdates(torch.cat([*words, places.int(), blocks.int()]), num_rows, num_entries)


def tensors(state: RowState) -> list[Tensor]:
    sampling = [getattr(state.sampling, name) for name in SamplingTensors.__slots__]
    return [state.token_ids, state.positions, state.seq_lens, state.block_tables, *sampling]


def moved_to(state: RowState, device: torch.device) -> RowState:
    token_ids, positions, seq_lens, block_tables, *sampling = (tensor.to(device).clone() for tensor in tensors(state))
    return RowState(token_ids, positions, seq_lens, block_tables, SamplingTensors(*sampling))


@pytest.mark.parametrize(
    ("max_rows", "num_rows", "num_entries"),
    [(1, 1, 0), (1, 0, 1), (5, 5, 3), (64, 1, 900), (37, 20, 1024), (37, 37, 1025), (300, 300, 5000), (4, 0, 0)],
)
def test_the_state_becomes_what_the_reference_makes_it(
    max_rows: int, num_rows: int, num_entries: int, device: torch.device
) -> None:
    expected = make_state(max_rows, 29)
    updates, state = make_updates(expected, num_rows, num_entries), moved_to(expected, device)
    reference.update_rows(expected, updates)
    update_rows(state, dataclasses.replace(updates, words=updates.words.to(device)))
    for ours, theirs in zip(tensors(state), tensors(expected), strict=True):
        assert torch.equal(ours.cpu(), theirs)


def test_rows_may_change_places(device: torch.device) -> None:
    """A ring of 33 rows, each of which takes over its neighbour's token."""
    state = moved_to(make_state(33, 1), device)
    before = state.token_ids.clone()
    rows = torch.arange(33, dtype=torch.int32)
    columns = torch.zeros(8, 33, dtype=torch.int32)
    columns[0], columns[1] = rows, rows.roll(-1)
    words = torch.cat((torch.zeros(66, dtype=torch.int32), columns.flatten())).to(device)
    update_rows(state, RowUpdates(words, 33, 0))
    assert torch.equal(state.token_ids, before.roll(-1))
    assert not state.seq_lens.any() and not state.positions.any()
