"""Choice of rows that share a prefix of their block tables. Torch-free.

A shared prefix is read once for all rows of a group. So a group of n rows spares (n - 1) times the places of the
prefix. A row is in a single group at most. If many rows begin with a document, and some rows with more, many groupings
are possible. `prefix_groups` finds the grouping with most spared places.

All prefixes of two or more rows form a tree. A row may join the group of any prefix of its table. Two passes choose the
groups:

1. From long prefixes to short: a group costs the places of the prefix. Each row gains as many places, less the
   **price** for leaving its alternative. The alternative is no group, or a group of a longer prefix, which is given up
   as a whole. If the rows gain more than the group costs, a price is set at which the group's rows leave without loss.
2. From short prefixes to long: a group is formed unless its rows are in a group that paid the price.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

PLACE_BYTES = 4


class PrefixGroup(NamedTuple):
    """Rows whose tables begin with equal blocks."""

    num_places: int
    rows: list[int]  # at least two


class _Prefix:
    """A prefix shared by the tables `[begin, end)` in sorted order, and by no other table."""

    __slots__ = ("begin", "bunches", "end", "num_places", "num_single", "price")

    def __init__(self, num_places: int, begin: int) -> None:
        self.num_places, self.begin, self.end = num_places, begin, begin
        self.num_single = 0  # rows without a longer prefix in a group
        self.bunches: list[tuple[float, int]] = []  # price and number of rows in groups of longer prefixes
        self.price = 0.0  # of a row in the group; 0: the group is worth nothing

    def close(self, end: int) -> None:
        """Compute the worth of the prefix's group once all rows are known, and the price for shorter prefixes."""
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
    """Return the disjoint groups with most spared places, `(rows - 1) * places` each.

    Args:
        tables: by row, int32 block ids of shareable places.
        min_places: shorter prefixes are ignored.
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
    """Return all prefixes shared by two or more rows, longer prefixes before shorter.

    Args:
        common: for each table in order, the places shared with the next.
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
    """Return for each table the number of places shared with the next table; 0 if below `min_places`."""
    common, guess = list[int](), min_places
    for table, following in pairwise(tables):
        common.append(_num_common(table, following, min_places, guess))
        guess = common[-1] or guess
    return [*common, 0]


def _num_common(one: bytes, other: bytes, min_places: int, guess: int) -> int:
    """Count common places by bisection; a right guess ends the search at once."""
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
