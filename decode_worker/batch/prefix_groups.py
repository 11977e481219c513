"""Which rows had better share a prefix of their block tables. Torch-free.

A shared prefix is read once for all rows of a group, so all but one of its rows are spared these places, and a row is
in one group at most. Rows that all begin with one document, and some of them with more, may be grouped in many ways;
`prefix_groups` finds the one that spares most.

All prefixes of two or more rows are a tree, in which a row may join the group of any prefix that it begins with. Seen
from below, a group costs as many places as its prefix has, and each row in it gains as many, less the **price** for
which it leaves what it would be in otherwise: nothing, or a group of a longer prefix, which is given up as a whole.
Where a group is worth more than it costs, its rows can be had for a price that makes good what is lost with it. Seen
from above, a group is formed where its rows are not in one that paid their price.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

PLACE_BYTES = 4


class PrefixGroup(NamedTuple):
    """Rows whose tables begin with the same blocks."""

    num_places: int
    rows: list[int]  # two at least


class _Prefix:
    """Of tables `[begin, end)`, in their order, and of no others."""

    __slots__ = ("begin", "bunches", "end", "num_places", "num_single", "price")

    def __init__(self, num_places: int, begin: int) -> None:
        self.num_places, self.begin, self.end = num_places, begin, begin
        self.num_single = 0  # rows that share nothing longer, or not in a group of their own
        self.bunches: list[tuple[float, int]] = []  # price and number of those in groups of longer prefixes
        self.price = 0.0  # of a row in its group; 0 if that is worth nothing

    def close(self, end: int) -> None:
        """All of its rows are known: work out what its group is worth, and what a shorter prefix's can have of it."""
        self.end = end
        self.bunches = sorted(bunch for bunch in self.bunches if bunch[0] < self.num_places)
        worth = float((self.num_single - 1) * self.num_places)
        worth += sum((self.num_places - price) * num_rows for price, num_rows in self.bunches)
        if worth <= 0:
            return
        num_taken, num_rows = 0, self.num_single
        while num_taken < len(self.bunches) and self.bunches[num_taken][0] * num_rows < worth:
            price, count = self.bunches[num_taken]
            worth, num_rows, num_taken = worth + price * count, num_rows + count, num_taken + 1
        self.price, self.num_single = worth / num_rows, 0
        self.bunches[:num_taken] = [(self.price, num_rows)]


def prefix_groups(tables: Sequence[bytes], min_places: int) -> list[PrefixGroup]:
    """Disjoint groups that together spare most places, `(rows - 1) * places` each.

    Args:
        tables: by row, int32 block ids of the places that may be shared.
        min_places: shorter prefixes are none.
    """
    order = sorted(range(len(tables)), key=tables.__getitem__)
    common = _common_places([tables[row] for row in order], max(1, min_places))
    chosen: list[_Prefix | None] = [None] * len(tables)
    for prefix in reversed(_prefixes(common)):
        around = chosen[prefix.begin]
        if prefix.price > (around.num_places if around else 0):
            chosen[prefix.begin : prefix.end] = [prefix] * (prefix.end - prefix.begin)
    groups: dict[_Prefix, PrefixGroup] = {}
    for row, prefix_of_row in zip(order, chosen, strict=True):
        if prefix_of_row is not None:
            groups.setdefault(prefix_of_row, PrefixGroup(prefix_of_row.num_places, [])).rows.append(row)
    return list(groups.values())


def _prefixes(common: Sequence[int]) -> list[_Prefix]:
    """All that two or more rows share, longer ones before shorter ones.

    Args:
        common: of each table in order, places that it shares with the next.
    """
    shared, closed = [_Prefix(0, 0)], list[_Prefix]()
    for row, num_places in enumerate(common):
        begin, num_single, bunches = row, 1, list[tuple[float, int]]()
        while shared[-1].num_places > num_places:
            prefix = shared.pop()
            prefix.num_single += num_single
            prefix.bunches += bunches
            prefix.close(row + 1)
            closed.append(prefix)
            begin, num_single, bunches = prefix.begin, prefix.num_single, prefix.bunches
        if shared[-1].num_places < num_places:
            shared.append(_Prefix(num_places, begin))
        shared[-1].num_single += num_single
        shared[-1].bunches += bunches
    return closed


def _common_places(tables: Sequence[bytes], min_places: int) -> list[int]:
    """Of each table how many places it shares with the next; 0 if those are fewer than the least, and of the last."""
    common, guess = list[int](), min_places
    for table, following in pairwise(tables):
        common.append(_num_common(table, following, min_places, guess))
        guess = common[-1] or guess
    return [*common, 0]


def _num_common(one: bytes, other: bytes, min_places: int, guess: int) -> int:
    """By bisection, which a right guess ends at once."""
    shared, most = 0, min(len(one), len(other)) // PLACE_BYTES
    guesses = [guess + 1, guess]
    while shared < most and most >= min_places:
        places = guesses.pop() if guesses else (shared + most + 1) // 2
        if not shared < places <= most:
            continue
        begin = shared * PLACE_BYTES
        if one.startswith(other[begin : places * PLACE_BYTES], begin):
            shared = places
        else:
            most = places - 1
    return shared if shared >= min_places else 0
