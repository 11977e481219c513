"""Places of a text with a block in some set of short keys, group by group.

A text of 100,000 tokens has thousands of keys in each group, and the router's event loop has no time for each of them.
So lookup stops at the first place without a block in some append-only group.
"""

from array import array
from collections.abc import Collection, Sequence

import numpy as np

from common.wire.values.block_key import short_keys_in_group
from common.wire.values.kv_layout import KVLayout

AT_ONCE = 256
"""Keys looked up at once."""
Sets = Sequence[Collection[int]]
"""Short keys; a block counts if its key is in any set."""


def places_in(layout: KVLayout, keys: Sequence[int], sets: Sets) -> list[np.ndarray]:
    """Tell which places of a text with these keys have a block, by group: [num_alike] bool.

    The first `num_alike` places are all there in append-only groups. Without such a group, all places are looked up.
    """
    length, have = len(keys), dict[int, np.ndarray]()
    for number in sorted(range(len(layout.groups)), key=lambda number: not layout.groups[number].is_append_only):
        if layout.groups[number].is_append_only:
            length = _num_leading(keys[:length], number, sets)
            have[number] = np.ones(length, bool)
        else:
            have[number] = are_in(keys[:length], number, sets)
    return [have[number][:length] for number in range(len(layout.groups))]


def are_in(keys: Sequence[int], group: int, sets: Sets) -> np.ndarray:
    """Tell for each key of group 0 whether the block of a group is there: [num_keys] bool."""
    of_group = short_keys_in_group(array("Q", keys), group)
    return np.fromiter((any(key in some for some in sets) for key in of_group), bool, len(of_group))


def _num_leading(keys: Sequence[int], group: int, sets: Sets) -> int:
    for begin in range(0, len(keys), AT_ONCE):
        missing = np.flatnonzero(~are_in(keys[begin : begin + AT_ONCE], group, sets))
        if len(missing):
            return begin + int(missing[0])
    return len(keys)
