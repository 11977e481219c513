"""Rows that begin alike attend together to whole runs of what they share, each once, and programs have as much."""

import math
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from common.kernels.attention.decode_division import divide
from common.kernels.attention.decode_parts import MAX_PARTS, PART_TILES, RUN_PARTS, TILE
from common.kernels.attention.shared_division import MIN_TOKENS, bundle_queries, share, tokens_of_bundle
from common.kernels.attention.shared_parts import (
    MAX_SHARING_ROWS,
    make_shared_parts,
    max_shared_items,
    shared_parts_bytes,
)
from common.kernels.base.attention_operands import SharedDivision, SharedPrefixes


@dataclass(frozen=True)
class Row:
    number: int
    num_tokens: int
    seq_len: int

    @property
    def part_tiles(self) -> int:
        return max(math.ceil(math.ceil(self.seq_len / TILE) / MAX_PARTS), PART_TILES)

    @property
    def runs(self) -> int:
        """Whole ones that others may have, too."""
        return self.num_tokens // (TILE * RUN_PARTS * self.part_tiles) if self.number >= 0 else 0


@dataclass(frozen=True)
class Item:
    first: int
    num_members: int
    begin: int
    end: int


@st.composite
def row_lists(draw: st.DrawFn) -> list[Row]:
    tokens_of = draw(st.lists(st.one_of(st.integers(16, 2000), st.integers(4000, 40_000)), min_size=1, max_size=5))
    rows = []
    for _ in range(draw(st.integers(1, 150))):
        number = draw(st.integers(-1, len(tokens_of) - 1))
        num_tokens = tokens_of[number] if number >= 0 else draw(st.integers(0, 9999))  # anything where there is none
        seq_len = (num_tokens if number >= 0 else 0) + draw(st.one_of(st.integers(1, 100), st.integers(1, 9000)))
        rows.append(Row(number, num_tokens, draw(st.sampled_from([seq_len, seq_len, 0])) if number < 0 else seq_len))
    return rows


def shared_by(rows: list[Row], tokens: int, num_kv: int, num_slots: int, device: torch.device) -> SharedDivision:
    numbers, num_tokens, seq_lens = (
        torch.tensor(column, dtype=torch.int32, device=device)
        for column in zip(*((row.number, row.num_tokens, row.seq_len) for row in rows), strict=True)
    )
    return share(SharedPrefixes(numbers, num_tokens), seq_lens, tokens, num_kv, num_slots)


@settings(max_examples=40)
@given(rows=row_lists(), tokens=st.sampled_from([4, 16, 32]), num_slots=st.sampled_from([1, 264]))
@example(rows=[Row(0, 8192, 9000)] * 150, tokens=16, num_slots=264)
@example(rows=[Row(i // 2, 512, 600) for i in range(150)], tokens=4, num_slots=264)
@example(rows=[Row(i // 2, 40_000, 40_001) for i in range(150)], tokens=32, num_slots=264)
def test_rows_share_whole_runs_once(rows: list[Row], tokens: int, num_slots: int, device: torch.device) -> None:
    num_kv = 8
    division = shared_by(rows, tokens, num_kv, num_slots, device)
    [num_items] = division.num_items.tolist()
    assert num_items <= max_shared_items(len(rows), num_kv, num_slots) == len(division.items)
    assert (division.items[num_items:] == -1).all(), "poison"
    items = [Item(*words) for words in division.items[:num_items].tolist()]
    members, own_begins = division.members.tolist(), division.own_begins.tolist()

    groups = defaultdict[tuple[int, int], set[int]](set)
    for index, row in enumerate(rows):
        if row.runs:
            groups[row.number, row.part_tiles].add(index)
    groups_of = {index: group for group in groups.values() if len(group) > 1 for index in group}
    for index, row in enumerate(rows):
        assert own_begins[index] == (row.runs * RUN_PARTS * row.part_tiles if index in groups_of else 0)

    bundles = defaultdict[tuple[int, int], list[int]](list)  # their items, by number
    for index, item in enumerate(items):
        bundles[item.first, item.num_members].append(index)
    attended = []
    units, pieces, places = division.units.tolist(), division.pieces.tolist(), division.places.tolist()
    for (first, num_members), own in bundles.items():
        assert 1 <= num_members <= tokens
        together = members[first : first + num_members]
        attended += together
        assert set(together) <= groups_of[together[0]]
        assert [places[row] for row in together] == list(range(num_members))
        assert {(units[row], pieces[row]) for row in together} == {(own[0], len(own))}
        assert own == list(range(own[0], own[0] + len(own)))
        ends = [0, *(items[index].end for index in own)]
        assert [items[index].begin for index in own] == ends[:-1] and ends[-1] == own_begins[together[0]]
        assert all(end > begin for begin, end in pairwise(ends))
    assert sorted(attended) == sorted(groups_of)


@pytest.mark.parametrize("num_rows", [2, 16, 64, 256])
@pytest.mark.parametrize("num_tokens", [1024, 8192, 32_768])
def test_nobody_has_much_more_than_the_others(num_rows: int, num_tokens: int, device: torch.device) -> None:
    """One group: every program has one item at most, unless there are more bundles, and few have half of a share."""
    tokens = tokens_of_bundle(bundle_queries(num_rows, 32, 8), 32, 8)
    division = shared_by([Row(0, num_tokens, num_tokens + 9)] * num_rows, tokens, 8, 264, device)
    items = [Item(*words) for words in division.items[: division.num_items.tolist()[0]].tolist()]
    share_tiles = sum(item.end - item.begin for item in items) * 8 / 264
    assert len(items) * 8 <= 264
    assert max(item.end - item.begin for item in items) <= 2 * max(share_tiles, 1)


@pytest.mark.parametrize(
    ("num_rows", "num_q", "num_kv"), [(1, 32, 8), (256, 32, 8), (9, 16, 1), (256, 5, 5), (4, 8, 8)]
)
def test_bundles_have_64_queries_or_128(num_rows: int, num_q: int, num_kv: int) -> None:
    heads = 1 << (num_q // num_kv - 1).bit_length()
    queries = bundle_queries(num_rows, num_q, num_kv)
    assert queries == (64 if num_rows * heads <= 64 else 128)
    assert tokens_of_bundle(queries, num_q, num_kv) == queries // heads >= MIN_TOKENS


@pytest.mark.parametrize(("num_rows", "num_kv", "num_slots"), [(256, 8, 264), (1, 3, 7), (512, 40, 4)])
def test_bytes_of_parts_are_known_before_they_are_made(num_rows: int, num_kv: int, num_slots: int) -> None:
    made = make_shared_parts(num_rows, num_slots, num_kv, 64, torch.device("meta"))
    tensors = (made.partial, made.maxima, made.sums)
    assert shared_parts_bytes(num_rows, num_slots, num_kv, 64) == sum(tensor.nbytes for tensor in tensors)


def test_more_rows_than_are_told_apart_are_refused(device: torch.device) -> None:
    rows = [Row(0, 512, 600)] * MAX_SHARING_ROWS
    assert shared_by(rows, 16, 8, 264, device).own_begins.shape[0] == MAX_SHARING_ROWS
    with pytest.raises(AssertionError, match=f"{MAX_SHARING_ROWS + 1} rows: at most {MAX_SHARING_ROWS}"):
        shared_by([*rows, rows[0]], 16, 8, 264, device)


@pytest.mark.medium
@settings(max_examples=20)
@given(rows=row_lists())
def test_what_is_left_of_each_context_is_its_own(rows: list[Row], device: torch.device) -> None:
    division = shared_by(rows, 16, 8, 264, device)
    seq_lens = torch.tensor([row.seq_len for row in rows], dtype=torch.int32, device=device)
    own = divide(seq_lens, 8, 264, 3, shared=division)
    ends: dict[int, int] = {}
    words = own.items[: int(own.counts[0])].tolist()
    for row, _, begin, end, *_, own_begin in sorted(words, key=lambda each: (each[0], each[2])):
        assert own_begin == division.own_begins[row]
        assert begin == ends.get(row, own_begin) and (begin - own_begin) % rows[row].part_tiles == 0
        assert end > begin or rows[row].seq_len == 0
        ends[row] = end
    assert [ends[index] for index in range(len(rows))] == [-(-row.seq_len // TILE) for row in rows]
