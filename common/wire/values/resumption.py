"""The longest prefix of a text that can be resumed from cached blocks, by the kinds of a layout's groups.

A prefix ends with a full block. Its next token needs all blocks of append-only groups, the last blocks of windows, and
a snapshot of each state, taken exactly there.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from common.wire.values.kv_layout import KVGroup, KVLayout


class Resumable(NamedTuple):
    """Lengths of a text's cached prefixes, in places."""

    num_places: int  # computing may go on behind them
    num_alike: int  # their blocks of append-only groups are cached; never fewer


def needed(group: KVGroup, num_places: int, first: int = 0) -> range:
    """Return the places, from `first` on, whose blocks of a group are needed to resume behind `num_places` places."""
    if group.is_append_only or num_places <= first:
        return range(first, max(first, num_places))
    if not group.grows:
        return range(num_places - 1, num_places)
    return range(max(first, group.first_seen(num_places * group.block_size + 1)), num_places)


def bytes_to_resume(layout: KVLayout, num_places: int, num_alike: int = 0) -> int:
    """Return the bytes of all blocks needed to resume behind `num_places` places.

    Args:
        num_alike: first places whose blocks of append-only groups are not counted.
    """
    return sum(
        len(needed(group, num_places, num_alike if group.is_append_only else 0)) * group.block_bytes
        for group in layout.groups
    )


def resumable(layout: KVLayout, have: Sequence[np.ndarray]) -> Resumable:
    """Return the longest cached prefixes of a text, from a place on before which all blocks are known to be there.

    Args:
        have: which places have a cached block, by group: [num_places] bool.
    """
    most, *_ = have[0].shape
    lasting = [_num_leading(here) for group, here in zip(layout.groups, have, strict=True) if group.is_append_only]
    most = min(lasting, default=most)
    fits = np.ones(most, bool)  # by length - 1
    for group, of_group in zip(layout.groups, have, strict=True):
        if not group.is_append_only and most:
            fits &= _in_sight(group, of_group[:most]) if group.grows else of_group[:most]
    lengths = np.flatnonzero(fits)
    num_places = int(lengths[-1]) + 1 if len(lengths) else 0
    return Resumable(num_places, most if lasting else num_places)


def _num_leading(have: np.ndarray) -> int:
    missing = np.flatnonzero(~have)
    return int(missing[0]) if len(missing) else len(have)


def _in_sight(group: KVGroup, have: np.ndarray) -> np.ndarray:
    """Tell for each length - 1 whether all places seen by the next token are there: [num_places] bool."""
    places = np.arange(len(have))
    last_missing = np.maximum.accumulate(np.where(have, -1, places))
    num_seen = len(needed(group, group.window))  # as many behind any length, but for the first places of a text
    in_sight: np.ndarray = np.maximum(0, places + 1 - num_seen) > last_missing
    return in_sight
