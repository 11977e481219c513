"""The host's changes: exactly the named rows and entries are written, also when rows change places."""

import dataclasses

import pytest
import torch
from torch import Tensor

from common.device.sampling_tensors import sampling_tensors
from common.kernels.operands import RowState, RowUpdates, SamplingTensors
from common.kernels.update_rows import update_rows
from common.ops import reference
from common.wire.sampling_params import SamplingParams


def make_state(max_rows: int, max_blocks: int) -> RowState:
    def ints(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.randint(1 << 24, shape).to(dtype)

    columns = sampling_tensors([SamplingParams()] * max_rows, torch.device("cpu")).columns()
    sampling = SamplingTensors(*(ints(max_rows, dtype=column.dtype) for column in columns))
    heads = [ints(max_rows) for _ in range(4)]
    return RowState(heads[0], heads[1], heads[2], heads[3], ints(max_rows, max_blocks), sampling)


def make_updates(state: RowState, num_rows: int, num_entries: int) -> RowUpdates:
    """Random rows, every other one with a token from a random row, and random distinct entries."""
    max_rows = state.token_ids.shape[0]
    rows, sources = torch.randperm(max_rows)[:num_rows], torch.randperm(max_rows)[:num_rows]
    sources[::2] = -1
    heads = [rows, sources, *torch.randint(1 << 30, (3, num_rows))]
    heads[3][::3] = 0  # cleared
    sampling = [torch.randint(1 << 30, (num_rows * column.element_size() // 4,)) for column in state.sampling.columns()]
    places = torch.randperm(state.block_tables.numel())[:num_entries]
    blocks = torch.randint(1 << 30, (num_entries,))
    words = torch.cat([*heads, *sampling, places, blocks]).int()
    return RowUpdates(words, num_rows, num_entries)


def tensors(state: RowState) -> list[Tensor]:
    heads = [state.token_ids, state.positions, state.seq_lens, state.state_slots, state.block_tables]
    return [*heads, *state.sampling.columns()]


def moved_to(state: RowState, device: torch.device) -> RowState:
    token_ids, positions, seq_lens, slots, tables, *sampling = (x.to(device).clone() for x in tensors(state))
    return RowState(token_ids, positions, seq_lens, slots, tables, SamplingTensors(*sampling))


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
    """A ring of 33 rows, each of which takes over its neighbour's token and length."""
    state = moved_to(make_state(33, 1), device)
    before, lens = state.token_ids.clone(), state.seq_lens.clone()
    rows = torch.arange(33, dtype=torch.int32)
    words = torch.zeros(state.num_words(33, 0), dtype=torch.int32)
    words[:66] = torch.cat((rows, rows.roll(-1)))
    update_rows(state, RowUpdates(words.to(device), 33, 0))
    assert torch.equal(state.token_ids, before.roll(-1))
    assert torch.equal(state.seq_lens, lens.roll(-1)) and torch.equal(state.positions, lens.roll(-1) - 1)
