"""Groups are of rows that begin alike, and none spare more."""

from array import array
from collections.abc import Iterator, Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decode_worker.batch.prefix_groups import prefix_groups

Table = Sequence[int]


def as_bytes(tables: Sequence[Table]) -> list[bytes]:
    return [array("i", table).tobytes() for table in tables]


def num_common(tables: Sequence[Table], min_places: int) -> int:
    """Places that all of them begin with; 0 if that is too few."""
    num_places = min(map(len, tables))
    while num_places and any(one[:num_places] != other[:num_places] for one, other in pairwise(tables)):
        num_places -= 1
    return num_places if num_places >= min_places else 0


def divisions(rows: list[int]) -> Iterator[list[list[int]]]:
    """All ways to divide rows among groups."""
    if not rows:
        yield []
        return
    first, *others = rows
    for division in divisions(others):
        yield [[first], *division]
        for number, group in enumerate(division):
            yield [*division[:number], [first, *group], *division[number + 1 :]]


def most_spared(tables: Sequence[Table], min_places: int) -> int:
    def spared(rows: list[int]) -> int:
        return (len(rows) - 1) * num_common([tables[row] for row in rows], min_places)

    return max(sum(map(spared, division)) for division in divisions(list(range(len(tables)))))


def check(tables: Sequence[Table], min_places: int) -> int:
    """Returns what is spared."""
    groups = prefix_groups(as_bytes(tables), min_places)
    rows = [row for group in groups for row in group.rows]
    assert len(rows) == len(set(rows))
    for group in groups:
        assert len(group.rows) > 1 and group.num_places >= min_places
        assert num_common([tables[row] for row in group.rows], 1) == group.num_places
    return sum((len(group.rows) - 1) * group.num_places for group in groups)


# Of few ids that only the first places have, so that there are many common prefixes, at all depths.
TABLES = st.lists(st.lists(st.integers(0, 1), max_size=12), max_size=7)
# Ids whose bytes are alike but for one, and of which negative ones come last.
STRETCHED = st.lists(st.lists(st.sampled_from([1, 1 << 8, 1 << 24, -1]), max_size=4), max_size=7)


@pytest.mark.medium
@given(tables=TABLES | STRETCHED, repeats=st.integers(1, 3), min_places=st.integers(0, 4))
@settings(max_examples=400)
def test_no_groups_spare_more(tables: list[list[int]], repeats: int, min_places: int) -> None:
    tables = [[block_id for block_id in table for _ in range(repeats)] for table in tables]
    assert check(tables, min_places) == most_spared(tables, max(1, min_places))


@st.composite
def conversations(draw: st.DrawFn) -> list[list[int]]:
    """Each goes on where another one ended or was cut off, by blocks of its own."""
    tables = [list(range(draw(st.integers(0, 9))))]
    for number in range(1, draw(st.integers(1, 6)) + 1):
        before = tables[draw(st.integers(0, number - 1))]
        own = [100 * number + place for place in range(draw(st.integers(0, 30)))]
        tables.append(before[: draw(st.integers(0, len(before)))] + own)
    return tables


@pytest.mark.medium
@given(tables=conversations())
@settings(max_examples=400)
def test_of_prefixes_of_prefixes_those_are_chosen_that_spare_most(tables: list[list[int]]) -> None:
    assert check(tables, 1) == most_spared(tables, 1)


def test_a_document_is_a_group_beside_all_that_share_its_beginning_only() -> None:
    system, document = list(range(64)), list(range(1000, 3000))
    alone = [[*system, 5000 + row] for row in range(100)]
    pairs = [[*system, 6000 + row // 2, 7000 + row] for row in range(40)]
    readers = [[*system, *document, 8000 + row] for row in range(4)]
    groups = prefix_groups(as_bytes([*alone, *pairs, *readers]), 16)
    assert sorted((group.num_places, sorted(group.rows)) for group in groups) == [
        (64, list(range(140))),
        (2064, list(range(140, 144))),
    ]


@pytest.mark.parametrize("num_rows", [0, 1, 1024])
def test_prefixes_within_prefixes_may_be_as_many_as_rows(num_rows: int) -> None:
    tables = [list(range(1, 2 + row)) for row in range(num_rows)]
    assert (check(tables, 1) > 0) == (num_rows > 1)
