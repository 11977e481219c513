"""Every byte of a pool is one block's, wherever its group lies, and numbers tell groups apart."""

import itertools

import pytest

from common.wire.values.kv_layout import ALIGNMENT_BYTES, KVLayout
from common.wire.values.pool_shape import PoolShape
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
def test_blocks_lie_side_by_side_and_never_over_one_another(layout: KVLayout) -> None:
    for num_blocks in itertools.product((2, 3, 7), repeat=len(layout.groups)):
        shape, end, block_id = PoolShape(layout, num_blocks), 0, 0
        for number, (group, count) in enumerate(zip(layout.groups, num_blocks, strict=True)):
            assert shape.proof_ids[number] == block_id
            assert shape.offsets[number] % ALIGNMENT_BYTES == 0 and 0 <= shape.offsets[number] - end < ALIGNMENT_BYTES
            end = shape.offsets[number]
            for _ in range(count):
                assert shape.group_of(block_id) == number
                assert shape.place(block_id) == (end, group.block_bytes)
                end, block_id = end + group.block_bytes, block_id + 1
        assert (shape.num_ids, shape.num_bytes) == (block_id, end)
        backwards = list(reversed(range(block_id)))
        assert sorted(itertools.chain.from_iterable(shape.by_group(backwards)), reverse=True) == backwards
        within = [[*reversed(range(count))] for count in num_blocks]
        assert shape.within_groups(backwards) == within


@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_is_divided_by_what_sequences_have_of_each_group(layout: KVLayout) -> None:
    for num_bytes in (10_000, 123_457, 5_000_000):
        num_blocks = layout.divided(num_bytes, 40)
        assert PoolShape(layout, num_blocks).num_bytes <= num_bytes
        shares = layout.most_blocks(40, 1)
        sequences = [count / share for count, share in zip(num_blocks, shares, strict=True)]
        assert max(sequences) - min(sequences) < 1


@pytest.mark.parametrize("num_bytes", [40_000, 10_000_000])
def test_windows_have_blocks_for_a_prompt_step(num_bytes: int) -> None:
    layout = KVLayout("model", (window(2, 3, 5), full(2, 1, 3, 4, "float16"), state(77)))
    num_blocks = layout.divided(num_bytes, 40, 100)
    assert PoolShape(layout, num_blocks).num_bytes <= num_bytes
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
    assert "groups[0].kind: 'LATENT' here, 'STATE' there" in ours.differences(KVLayout("m", (state(), window(4, 8))))
