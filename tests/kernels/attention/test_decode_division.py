"""Every tile of every context is somebody's, cut where parts begin, and nobody has much more than the others."""

from dataclasses import dataclass
from heapq import heapreplace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from common.kernels.attention.decode_division import JOIN_TILES, divide, limits_for, programs_per_sm
from common.kernels.attention.decode_parts import MAX_PARTS, PART_TILES, RUN_PARTS, TILE

# A mix of what is short, long and much too long beside the rest; 0 is padding.
LENGTHS = st.lists(
    st.one_of(st.integers(0, 70), st.integers(0, 5000), st.integers(30_000, 131_072)), min_size=1, max_size=200
)


NUM_LAYERS = 3


@dataclass(frozen=True)
class Item:
    row: int
    length: int
    begin: int
    end: int
    join: int
    unit_parts: int
    num_items: int
    num_units: int
    own_begin: int


def tiles_of(length: int) -> int:
    return -(-length // TILE)


def first_tile_of(length: int, window: int) -> int:
    return max(length - window, 0) // TILE if window else 0


def part_tiles_of(length: int, window: int = 0) -> int:
    return max(-(-(tiles_of(length) - first_tile_of(length, window)) // MAX_PARTS), PART_TILES)


def items_of(lengths: list[int], num_kv: int, num_slots: int, device: torch.device, window: int = 0) -> list[Item]:
    """In the order in which programs take them."""
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    division = divide(seq_lens, num_kv, num_slots, NUM_LAYERS, window=window)
    limits = limits_for(len(lengths), num_kv, num_slots)
    assert (len(division.items), division.max_joins) == (limits.max_items, limits.max_joins)
    num_items, *drawn = division.counts.tolist()
    assert drawn == [0] * NUM_LAYERS
    items = [Item(*words) for words in division.items[:num_items].tolist()]
    assert all(item.length == lengths[item.row] for item in items)
    assert all(item.own_begin == first_tile_of(item.length, window) for item in items)
    assert (division.items[num_items:] == -1).all(), "poison"
    return items


@settings(max_examples=25)
@given(
    lengths=LENGTHS,
    num_kv=st.sampled_from([1, 2, 5, 8, 64]),
    num_slots=st.sampled_from([1, 4, 92, 396]),
    window=st.sampled_from([0, 0, 1, 64, 1000, 20_000]),
)
def test_items_cover_what_is_seen_of_every_context_once(
    lengths: list[int], num_kv: int, num_slots: int, window: int, device: torch.device
) -> None:
    items = items_of(lengths, num_kv, num_slots, device, window)
    cut = set()
    for row, length in enumerate(lengths):
        own = sorted((item for item in items if item.row == row), key=lambda item: item.begin)
        first, part_tiles = first_tile_of(length, window), part_tiles_of(length, window)
        bounds = [own[0].begin - first, *(item.end - first for item in own)]
        assert bounds[0] == 0 and bounds[-1] == tiles_of(length) - first
        assert [item.begin - first for item in own] == bounds[:-1], "one takes up where the other ends"
        assert all(bound % part_tiles == 0 for bound in bounds[:-1]), "no part is cut"
        assert all(item.end > item.begin for item in own) or length == 0
        assert all((item.join >= 0) == (len(own) > 1) for item in own)
        if len(own) > 1:
            unit_tiles = own[0].unit_parts * part_tiles
            assert own[0].unit_parts in (1, RUN_PARTS)
            assert all(bound % unit_tiles == 0 for bound in bounds[:-1]), "no unit is cut"
            whole = (own[0].join, own[0].unit_parts, len(own), -(-bounds[-1] // unit_tiles))
            assert {(item.join, item.unit_parts, item.num_items, item.num_units) for item in own} == {whole}
            assert own[0].join not in cut, "each cut context has a join of its own"
            cut.add(own[0].join)
    assert cut == set(range(len(cut))) and len(cut) <= limits_for(len(lengths), num_kv, num_slots).max_joins


@settings(max_examples=25)
@given(lengths=LENGTHS, num_slots=st.sampled_from([92, 264, 396]))
@example(lengths=[1, 1, 30_000, 38_977, 94_785, 94_849], num_slots=92)  # a whole one above any piece of those cut
def test_programs_end_at_about_the_same_time(lengths: list[int], num_slots: int, device: torch.device) -> None:
    """Each takes the next item when it is done with one, and none ends much later than all would if they were even."""
    num_kv, ends = 8, [0] * num_slots
    items = items_of(lengths, num_kv, num_slots, device)
    for item in items:
        for _ in range(num_kv):
            heapreplace(ends, ends[0] + item.end - item.begin)
    share = num_kv * sum(map(tiles_of, lengths)) / num_slots
    assert max(ends) <= 1.5 * share + max(map(part_tiles_of, lengths)) + JOIN_TILES


def test_long_items_come_first(device: torch.device) -> None:
    lengths = [int(n) for n in torch.randint(1, 3000, (90,))]
    items = items_of(lengths, 8, 264, device)
    sizes = [item.end - item.begin for item in items if item.begin == 0]
    small = max(sizes) / 7
    assert all(1.5 * max(size, small) >= later for i, size in enumerate(sizes) for later in sizes[i:])


@pytest.mark.parametrize(
    ("lengths", "num_items", "num_joins"),
    [
        ([1], 1, 0),
        ([128], 1, 0),  # a part
        ([1024], 8, 1),  # a part each
        ([1024] * 8, 32, 8),
        ([1024] * 24, 48, 24),
        ([1024] * 25, 25, 0),  # enough programs: nothing is joined
        ([1024] * 40, 40, 0),  # some programs have two, but joining would take as long
        ([8192] * 40, 120, 40),
        ([1024] * 64, 64, 0),
        ([8192] * 32, 32, 0),
        ([131_072], 48, 1),
        ([131_072, *[1024] * 63], 48 + 63, 1),
        ([0] * 7, 7, 0),
    ],
)
def test_contexts_are_cut_only_where_they_are_long(
    lengths: list[int], num_items: int, num_joins: int, device: torch.device
) -> None:
    items = items_of(lengths, 8, programs_per_sm(len(lengths), 8, 132) * 132, device)
    joins = {item.join for item in items} - {-1}
    assert (len(items), len(joins)) == (num_items, num_joins)


@pytest.mark.parametrize(("num_rows", "expected"), [(1, 3), (24, 3), (25, 2), (45, 2), (46, 3), (49, 3), (50, 2)])
def test_as_many_programs_share_a_multiprocessor_as_are_a_wave(num_rows: int, expected: int) -> None:
    assert programs_per_sm(num_rows, 8, 132) == expected


def test_no_rows_have_no_items(device: torch.device) -> None:
    assert len(divide(torch.zeros(0, dtype=torch.int32, device=device), 8, 264, NUM_LAYERS).items) == 0
