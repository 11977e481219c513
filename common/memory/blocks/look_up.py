"""Lookup of a text's blocks by key, group by group.

A text of 100,000 tokens has thousands of keys in each group, and mostly few of its blocks are there. So lookup stops at
the first place without a block in some append-only group, because nothing behind it helps.
"""

from collections.abc import Callable

import numpy as np

from common.wire.values.block_key import keys_in_group, unpacked
from common.wire.values.fields import KEY_BYTES
from common.wire.values.kv_layout import KVLayout

NOWHERE = -1
"""Stands for a key without a block."""
AT_ONCE = 256
"""Keys unpacked at once."""
Find = Callable[[bytes], int | None]
"""Returns the block of a key, or None."""


def look_up(layout: KVLayout, keys: bytes, find: Find) -> list[np.ndarray]:
    """Return the blocks of a text with these packed keys, by group: [num_alike] intp, or `NOWHERE`.

    The first `num_alike` places are all found in append-only groups. Without such a group, all places are looked up.
    """
    length, found = len(keys) // KEY_BYTES, dict[int, np.ndarray]()
    for number in sorted(range(len(layout.groups)), key=lambda number: not layout.groups[number].is_append_only):
        of_group = keys_in_group(keys[: length * KEY_BYTES], number)
        if layout.groups[number].is_append_only:
            found[number] = _leading(of_group, find)
            length = len(found[number])
        else:
            block_ids = map(find, unpacked(of_group))
            found[number] = np.array([NOWHERE if each is None else each for each in block_ids], np.intp)
    return [found[number][:length] for number in range(len(layout.groups))]


def _leading(keys: bytes, find: Find) -> np.ndarray:
    """Return the blocks found by the leading packed keys: [num_found] intp."""
    found = list[int | None]()
    for begin in range(0, len(keys), AT_ONCE * KEY_BYTES):
        some = list(map(find, unpacked(keys[begin : begin + AT_ONCE * KEY_BYTES])))
        if None in some:
            found += some[: some.index(None)]
            break
        found += some
    return np.array(found, np.intp)
