"""The host's changes: exactly the named rows and entries are written, also when rows change places."""

import pytest
import torch

from common.device.steps.row_state import HEADS, RowLayout
from common.kernels.base.row_operands import HEAD_WORDS, RowState, RowUpdates
from common.kernels.elementwise.update_rows import RowUpdater
from common.ops import reference


def make_state(max_rows: int, max_blocks: int) -> RowState:
    state = RowLayout(max_rows, max_rows * max_blocks).make_state(torch.device("cpu"))
    state.words[:] = torch.randint(1 << 24, state.words.shape)
    return state


def make_updates(state: RowState, num_rows: int, num_entries: int) -> RowUpdates:
    """Random rows, every other one with a token from a random row, and random distinct entries behind the heads."""
    max_rows = state.token_ids.shape[0]
    rows, sources = torch.randperm(max_rows)[:num_rows], torch.randperm(max_rows)[:num_rows]
    sources[::2] = -1
    heads = torch.stack([rows, sources, *torch.randint(1 << 30, (2, num_rows))], dim=1)
    heads[::3, 3] = 0  # cleared
    begin = len(HEADS) * state.column_words
    places = begin + torch.randperm(state.words.numel() - begin)[:num_entries]
    poison = torch.full((7,), 1 << 30)
    words = torch.cat([heads.flatten(), places, torch.randint(-(1 << 31), 1 << 31, (num_entries,)), poison])
    return RowUpdates(words.int(), num_rows, num_entries)


def moved_to(state: RowState, device: torch.device) -> RowState:
    max_rows = state.token_ids.shape[0]
    moved = RowLayout(max_rows, state.block_tables.numel()).make_state(device)
    moved.words.copy_(state.words)
    return moved


@pytest.mark.parametrize(
    ("max_rows", "num_rows", "num_entries"),
    [(1, 1, 0), (1, 0, 1), (5, 5, 3), (64, 1, 900), (37, 20, 1024), (37, 37, 1025), (300, 300, 5000), (4, 0, 0)],
)
def test_the_state_becomes_what_the_reference_makes_it(
    max_rows: int, num_rows: int, num_entries: int, device: torch.device
) -> None:
    """Again and again: a launch after the first takes a shorter way."""
    expected = make_state(max_rows, 29)
    state = moved_to(expected, device)
    update = RowUpdater(state)
    for _ in range(3):
        updates = make_updates(expected, num_rows, num_entries)
        reference.update_rows(expected, updates)
        words = updates.words.pin_memory() if device.type == "cuda" else updates.words
        update(RowUpdates(words, num_rows, num_entries))
        assert torch.equal(state.words.cpu(), expected.words)


def test_rows_may_change_places(device: torch.device) -> None:
    """A ring of 33 rows, each of which takes over its neighbour's token and length."""
    state = moved_to(make_state(33, 1), device)
    before, lens = state.token_ids.clone(), state.seq_lens.clone()
    rows = torch.arange(33, dtype=torch.int32)
    words = torch.zeros((33, HEAD_WORDS), dtype=torch.int32)
    words[:, 0], words[:, 1] = rows, rows.roll(-1)
    RowUpdater(state)(RowUpdates(words.flatten().to(device), 33, 0))
    assert torch.equal(state.token_ids, before.roll(-1))
    assert torch.equal(state.seq_lens, lens.roll(-1)) and torch.equal(state.positions, lens.roll(-1) - 1)
