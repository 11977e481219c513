"""Lookups of texts by key: found as by a walk over all places, without a look at places that cannot help."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.memory.blocks.index import BlockIndex
from common.memory.blocks.look_up import AT_ONCE, NOWHERE, look_up
from common.memory.host_tier.missing import missing_of
from common.wire.values.block_key import keys_in_group, unpacked
from common.wire.values.kv_layout import KVLayout
from common.wire.values.pool_shape import PoolShape
from tests.support.layouts import full, latent, state, window

BLOCK, CLIENT = 4, 1
FULL = full(1, 1, 1, BLOCK, "float32")
LAYOUTS = {
    "full": KVLayout("m", (FULL,)),
    "window": KVLayout("m", (window(BLOCK, 9),)),
    "hybrid": KVLayout("m", (state(2), window(BLOCK, 9), FULL, latent(BLOCK))),
}


def text(num_places: int) -> bytes:
    """Packed keys of so many places."""
    return b"".join(place.to_bytes(16, "big") for place in range(1, num_places + 1))


def places(layout: KVLayout, keys: bytes) -> dict[bytes, tuple[int, int]]:
    """Group and place of each key."""
    groups = range(len(layout.groups))
    return {key: (n, at) for n in groups for at, key in enumerate(unpacked(keys_in_group(keys, n)))}


class Counted(dict[bytes, int]):
    """Blocks by key, which counts lookups."""

    num_asked = 0

    def get(self, *args: Any) -> Any:
        self.num_asked += 1
        return super().get(*args)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@given(data=st.data())
def test_places_are_looked_up_as_far_as_all_append_only_groups_have_them(layout: KVLayout, data: st.DataObject) -> None:
    keys = text(data.draw(st.integers(0, 12)))
    at = places(layout, keys)
    blocks = {key: number for number, key in enumerate(at) if data.draw(st.integers(0, 5))}
    lasting = [number for number, group in enumerate(layout.groups) if group.is_append_only]
    gaps = [place for key, (number, place) in at.items() if number in lasting and key not in blocks]
    expected = [[NOWHERE] * min(gaps, default=len(keys) // 16) for _ in layout.groups]
    for key, (number, place) in at.items():
        if place < len(expected[number]):
            expected[number][place] = blocks.get(key, NOWHERE)
    assert [found.tolist() for found in look_up(layout, keys, blocks.get)] == expected


def index_of(layout: KVLayout, num_blocks: int) -> tuple[BlockIndex, Counted]:
    index, blocks = BlockIndex(PoolShape(layout, tuple(num_blocks + 1 for _ in layout.groups))), Counted()
    index.sealed.block_of = blocks
    return index, blocks


def seal(index: BlockIndex, keys: bytes, group: int) -> np.ndarray:
    """Blocks of a group with these keys."""
    num_keys = len(keys) // 16
    ids = index.lease(CLIENT, tuple(num_keys * (n == group) for n in range(len(index.shape.num_blocks))))
    index.seal(CLIENT, ids, index.leases.generation[ids], keys_in_group(keys, group))
    return ids


def test_a_long_text_that_is_not_there_costs_next_to_nothing() -> None:
    index, blocks = index_of(LAYOUTS["hybrid"], 40)
    keys = text(20 * AT_ONCE)
    assert index.sealed.find(keys).num_alike == 0 and missing_of(index.sealed, set(), keys).num_places == 0
    assert blocks.num_asked <= 2 * AT_ONCE
    for group in (2, 3):
        seal(index, keys[: 16 * 30], group)
    blocks.num_asked = 0
    assert index.sealed.find(keys).num_alike == 30
    assert blocks.num_asked <= AT_ONCE + 3 * 30


def test_a_text_is_looked_up_again_only_after_keys_came_or_went() -> None:
    index, blocks = index_of(LAYOUTS["full"], 8)
    keys, others = text(4), text(10)[64:]
    ids = seal(index, keys[:32], 0)
    for _ in range(3):
        assert index.sealed.find(keys).found[0].tolist() == ids.tolist()
    assert blocks.num_asked == 4
    more = seal(index, keys[32:48], 0)
    assert index.sealed.find(keys).num_places == 3
    ids = np.concatenate([ids, more])
    index.free(CLIENT, ids, index.leases.generation[ids])
    assert index.sealed.find(keys).num_places == 3
    seal(index, others, 0)
    assert index.sealed.find(keys).num_places == 2
