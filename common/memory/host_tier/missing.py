"""Blocks of a text that a restore would bring, so that the text is resumed later than the pool alone allows."""

from collections.abc import Container, Sequence
from typing import NamedTuple

import numpy as np

from common.memory.blocks.sealed import SealedBlocks
from common.wire.values.block_key import keys_in_group, unpacked
from common.wire.values.kv_layout import Counts
from common.wire.values.resumption import needed, resumable


class Missing(NamedTuple):
    """Blocks of a text in host memory only, and all others that resuming needs."""

    num_places: int  # to compute without a restore
    keys: list[bytes]  # group after group, in the order of places
    counts: Counts  # of `keys`, by group
    others: Sequence[np.ndarray]  # blocks in the pool, by group: [num_others] intp


def missing_of(sealed: SealedBlocks, parked: Container[bytes], keys: bytes) -> Missing:
    """Return what a text with these packed keys misses in the pool and has in host memory."""
    layout = sealed.layout
    here = sealed.find(keys).num_places
    keys_of = [unpacked(keys_in_group(keys, number)) for number in range(len(layout.groups))]
    if here == len(keys_of[0]):
        return Missing(0, [], layout.nothing, [])
    ids_of = [[sealed.block_of.get(key, -1) for key in of_group] for of_group in keys_of]
    have = [
        np.fromiter((at >= 0 or key in parked for key, at in zip(of_group, ids, strict=True)), bool, len(ids))
        for of_group, ids in zip(keys_of, ids_of, strict=True)
    ]
    there = resumable(layout, have).num_places
    lacking: list[list[bytes]] = []
    others: list[np.ndarray] = []
    for group, of_group, ids in zip(layout.groups, keys_of, ids_of, strict=True):
        places = needed(group, there)
        lacking.append([of_group[place] for place in places if ids[place] < 0])
        others.append(np.array([ids[place] for place in places if ids[place] >= 0], np.intp))
    all_keys = [key for of_group in lacking for key in of_group]
    return Missing(there - here, all_keys if there > here else [], tuple(map(len, lacking)), others)
