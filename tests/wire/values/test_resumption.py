"""The longest prefix that can be resumed, compared with a walk over all lengths."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.wire.values.kv_layout import KVLayout
from common.wire.values.resumption import bytes_to_resume, needed, resumable
from tests.support.layouts import full, state, window

BLOCK = 4
FULL = full(1, 1, 1, BLOCK, "float32")
LAYOUTS = [KVLayout("m", groups) for groups in ((FULL,), (window(BLOCK, 9),), (FULL, window(BLOCK, 6), state(2)))]


def by_walk(layout: KVLayout, have: Sequence[Sequence[bool]], first: int) -> int:
    """Try all lengths, the longest first."""
    for length in range(len(have[0]), 0, -1):
        tokens = (first + length) * BLOCK
        for group, there in zip(layout.groups, have, strict=True):
            if group.grows:
                seen = [
                    p for p in range(first, first + length) if group.is_append_only or p >= group.first_seen(tokens + 1)
                ]
            else:
                seen = [first + length - 1]
            if not all(there[place - first] for place in seen):
                break
        else:
            return length
    return 0


@pytest.mark.parametrize("layout", LAYOUTS, ids=["full", "window", "hybrid"])
@given(data=st.data())
def test_it_is_what_a_walk_finds(layout: KVLayout, data: st.DataObject) -> None:
    first, num_places = data.draw(st.integers(0, 5)), data.draw(st.integers(0, 12))
    row = st.lists(st.integers(0, 4).map(bool), min_size=num_places, max_size=num_places)
    have = [data.draw(row) for _ in layout.groups]
    found = resumable(layout, [np.array(of_group, bool) for of_group in have])
    assert found.num_places == by_walk(layout, have, first) <= found.num_alike
    end = first + found.num_places
    for group, there in zip(layout.groups, have, strict=True):
        assert all(there[place - first] for place in needed(group, end, first))


def test_bytes_are_those_of_all_blocks_of_tokens_the_last_of_windows_and_a_state() -> None:
    layout = LAYOUTS[-1]
    sizes = [group.block_bytes for group in layout.groups]
    assert bytes_to_resume(layout, 10) == 10 * sizes[0] + 2 * sizes[1] + sizes[2]
    assert bytes_to_resume(layout, 0) == 0
