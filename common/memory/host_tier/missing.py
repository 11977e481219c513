"""Blocks of a text that a restore would bring, so that the text is resumed later than the pool alone allows."""

from collections.abc import Container, Sequence
from itertools import chain, compress
from typing import NamedTuple

import numpy as np

from common.memory.blocks.look_up import NOWHERE, look_up
from common.memory.blocks.sealed import SealedBlocks
from common.wire.values.block_key import keys_in_group, unpacked
from common.wire.values.fields import KEY_BYTES
from common.wire.values.kv_layout import Counts
from common.wire.values.resumption import needed, resumable

PARKED = -2
"""Stands for a key whose block is in host memory only."""


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
    if here == len(keys) // KEY_BYTES:
        return Missing(0, [], layout.nothing, [])

    def find(key: bytes) -> int | None:
        return sealed.block_of.get(key, PARKED if key in parked else None)

    ids_of = look_up(layout, keys, find)
    there = resumable(layout, [ids != NOWHERE for ids in ids_of]).num_places
    if there <= here:
        return Missing(0, [], layout.nothing, [])
    lacking: list[list[bytes]] = []
    others: list[np.ndarray] = []
    for number, (group, of_all) in enumerate(zip(layout.groups, ids_of, strict=True)):
        places = needed(group, there)
        ids = of_all[places.start : places.stop]
        of_group = unpacked(keys_in_group(keys[places.start * KEY_BYTES : places.stop * KEY_BYTES], number))
        lacking.append(list(compress(of_group, ids == PARKED)))
        others.append(ids[ids != PARKED])
    return Missing(there - here, list(chain.from_iterable(lacking)), tuple(map(len, lacking)), others)
