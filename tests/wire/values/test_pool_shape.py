"""Every byte of a pool is one block's, wherever its group lies, and numbers tell groups apart."""

import itertools

import pytest
from msgspec import structs

from common.wire.values.kv_layout import KVLayout, scales_digest
from common.wire.values.pool_shape import PoolShape, are_enough
from tests.support.allocator import disjoint_ids
from tests.support.layouts import full, latent, one_group, state, window

LAYOUTS = [
    KVLayout("model", groups)
    for groups in (
        (full(2, 1, 5, 4, "float16"),),
        (latent(3, 7),),
        (full(1, 1, 1, 2, "float32"), window(3, 5, 9)),
        (full(1, 2, 3, 4, "bfloat16"), window(2, 3, 5), state(77)),
        (state(1), latent(2, 3), window(1, 1), full(1, 1, 1, 1, "float16")),
    )
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_of_a_group_lie_side_by_side_over_the_whole_memory(layout: KVLayout) -> None:
    for num_blocks in itertools.product((2, 3, 7), repeat=len(layout.groups)):
        shape, block_id = PoolShape(layout, num_blocks), 0
        for number, group in enumerate(layout.groups):
            count = shape.num_bytes // group.block_bytes
            for index in range(count):
                assert shape.group_of(block_id) == number
                assert shape.place(block_id) == (index * group.block_bytes, group.block_bytes)
                block_id += 1
        assert shape.num_ids == block_id
        backwards = list(reversed(range(block_id)))
        assert sorted(itertools.chain.from_iterable(shape.by_group(backwards)), reverse=True) == backwards
        within = [[*reversed(range(shape.num_bytes // group.block_bytes))] for group in layout.groups]
        assert shape.within_groups(backwards) == within


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_slab_holds_whole_blocks_of_any_group_and_all_blocks_that_are_promised(layout: KVLayout) -> None:
    for num_blocks in itertools.product((2, 3, 7, 40), repeat=len(layout.groups)):
        shape = PoolShape(layout, num_blocks)
        slab_bytes, num_slabs = shape.slabs.slab_bytes, shape.slabs.num_slabs
        for number in range(len(layout.groups)):
            for slab in range(num_slabs):
                ids = shape.ids_in(number, slab)
                assert len(ids) == shape.slabs.num_in_each[number] >= 1
                assert shape.place(ids[0]).offset >= slab * slab_bytes
                assert sum(shape.place(ids[-1])) <= (slab + 1) * slab_bytes
            assert shape.proof_ids[number] in shape.ids_in(number, number)
        assert are_enough(shape.assured, shape.shares) and are_enough(shape.capacity, shape.assured)
        assert shape.fits(shape.assured) and shape.assured == tuple(map(len, free_ids_of(shape)))


def free_ids_of(shape: PoolShape) -> list[list[int]]:
    """As many as are assured, of which no two share a byte."""
    ids = disjoint_ids(shape)
    places = sorted(shape.place(block_id) for block_id in [*itertools.chain.from_iterable(ids), *shape.proof_ids])
    assert all(sum(before) <= behind.offset for before, behind in itertools.pairwise(places))
    return ids


@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_is_divided_by_what_sequences_have_of_each_group(layout: KVLayout) -> None:
    for num_bytes in (10_000, 123_457, 5_000_000):
        num_blocks = layout.divided(num_bytes, 40)
        assert 0.9 * num_bytes <= PoolShape.within(num_bytes, layout, 40, 100, 10).num_bytes <= num_bytes
        shares = layout.most_blocks(40, 1)
        sequences = [count / share for count, share in zip(num_blocks, shares, strict=True)]
        assert max(sequences) - min(sequences) < 1


@pytest.mark.parametrize("num_bytes", [40_000, 10_000_000])
def test_windows_have_blocks_for_a_prompt_step(num_bytes: int) -> None:
    layout = KVLayout("model", (window(2, 3, 5), full(2, 1, 3, 4, "float16"), state(77)))
    num_blocks = layout.divided(num_bytes, 40, 100)
    assert PoolShape.within(num_bytes, layout, 40, 1000, 100).num_bytes <= num_bytes
    more = [count - other for count, other in zip(num_blocks, layout.divided(num_bytes, 40), strict=True)]
    assert more[0] > 0 > more[1]
    if num_bytes > 100_000:
        assert layout.most_tokens(num_blocks, 100) >= 100
    else:
        assert num_blocks[1] > 0.7 * layout.divided(num_bytes, 40)[1], "a quarter of the memory at most"


def test_one_group_has_all_blocks_that_there_is_memory_for() -> None:
    layout = one_group("m", 36, 8, 128, 16, "bfloat16")
    [group] = layout.groups
    for num_bytes in (1 << 30, (1 << 36) + 12_345):
        assert layout.divided(num_bytes, 4096) == (num_bytes // group.block_bytes,)


def test_layouts_that_differ_say_in_which_group_and_how() -> None:
    ours = KVLayout("m", (latent(4), window(4, 8)))
    assert ours.differences(KVLayout("m", (latent(4), window(4, 9)))) == ["groups[1].window: 8 here, 9 there"]
    fewer = ours.differences(KVLayout("m", (latent(4),)))
    assert fewer[0] == "num_groups: 2 here, 1 there" and "groups[1].window: 8 here, 'nothing' there" in fewer
    rounded = structs.replace(full(1, 1, 1, 4, "float8_e4m3fn"), scales=scales_digest([(0.5, 1.0)]))
    scaled, unscaled = KVLayout("m", (rounded,)), KVLayout("m", (structs.replace(rounded, scales=""),))
    assert scaled.differences(unscaled) == [f"groups[0].scales: {rounded.scales!r} here, '' there"]
    assert "groups[0].kind: 'LATENT' here, 'STATE' there" in ours.differences(KVLayout("m", (state(), window(4, 8))))
