"""Slabs counted again, block by block, from what the index says of each block."""

from itertools import chain

import numpy as np

from common.memory.blocks.index import BlockIndex
from common.memory.blocks.lease_table import BlockState
from common.memory.blocks.slab_table import VACANT
from common.wire.values.pool_shape import are_enough


def check_slabs(index: BlockIndex) -> None:
    """Every block in use or cached lies in a slab of its group, and over no other; the law holds; sums are right."""
    shape, table = index.shape, index.slabs
    slabs, num_slabs = shape.slabs, shape.slabs.num_slabs
    are_cached = np.zeros(shape.num_ids, bool)
    are_cached[list(chain.from_iterable(cached.block_ids.tolist() for cached in index.sealed.cached))] = True
    are_claimed = np.ones(shape.num_ids, bool)
    are_claimed[index.leases.in_state(BlockState.FREE)] = False
    assert not are_claimed[shape.proof_ids].any()
    are_claimed[shape.proof_ids] = True
    claimed = np.flatnonzero(are_claimed)
    groups = np.searchsorted(shape.begins, claimed, side="right") - 1
    sizes = np.array([group.block_bytes for group in shape.layout.groups])
    begins = (claimed - np.array(shape.begins)[groups]) * sizes[groups]
    ends, order = begins + sizes[groups], np.argsort(begins)
    assert (ends[order][:-1] <= begins[order][1:]).all(), "blocks overlap"
    of_slab = begins // slabs.slab_bytes
    assert (of_slab == (ends - 1) // slabs.slab_bytes).all() and (table.owner[of_slab] == groups).all()
    num_cached = np.bincount(of_slab[are_cached[claimed]], minlength=num_slabs)
    num_used = np.bincount(of_slab[~are_cached[claimed]], minlength=num_slabs)
    for slab, (group, free_ids) in enumerate(zip(table.owner.tolist(), table.free_ids, strict=True)):
        if group == VACANT:
            assert not (free_ids or num_used[slab] or num_cached[slab])
            continue
        ids = shape.ids_in(group, slab)
        assert {*free_ids} <= {*ids} and len(free_ids) == len(set(free_ids)) and not are_claimed[free_ids].any()
        assert len(free_ids) + num_used[slab] + num_cached[slab] == len(ids), "a block is lost, or outside its slab"
        assert len(free_ids) < len(ids), "a slab of free blocks is somebody's"
        assert (table.num_free[slab], table.num_cached[slab]) == (len(free_ids), num_cached[slab])
    assert sorted(table._vacant) == np.flatnonzero(table.owner == VACANT).tolist()
    are_pinned, numbers = num_used > 0, range(len(sizes))
    left = (table.num_free + num_cached) * are_pinned
    pinned = tuple(int(np.count_nonzero(are_pinned & (table.owner == group))) for group in numbers)
    assert table.room == (slabs, tuple(int(left[table.owner == group].sum()) for group in numbers), pinned)
    assert sum(map(max, pinned, slabs.floor)) <= num_slabs, "some group cannot have its floor"
    used = groups[~are_cached[claimed]]
    assert table.num_used == tuple(int(np.count_nonzero(used == group)) - 1 for group in numbers)
    assert are_enough(shape.capacity, index.num_free)
