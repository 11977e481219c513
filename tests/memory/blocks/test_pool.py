"""A pool with many waiting clients: the work of an answer."""

from typing import cast

import pytest

from common.memory.blocks.index import BlockIndex
from common.memory.blocks.pool import Pool, User, Want
from common.memory.devices.backing import Memory
from common.wire.values.kv_layout import Counts, KVLayout
from common.wire.values.pool_shape import PoolShape
from common.wire.values.slabs import Room
from tests.support.layouts import full, window

PROMPTS, DECODE = 0, 1
LAYOUT = KVLayout("model", (full(1, 1, 1, 2, "float16"), window(2, 4)))


def test_room_is_looked_at_once_for_each_want_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool(LAYOUT, 1, cast(Memory, None), BlockIndex(PoolShape(LAYOUT, (101, 101))), reserve=0.1)
    pool.users = {PROMPTS: User(PROMPTS, ("p", 1)), DECODE: User(DECODE, ("d", 1), is_decoding=True)}
    pool.index.lease(DECODE, (60, 60))
    for number in range(100):
        pool.wants[PROMPTS, f"r{number}", 0] = Want(PROMPTS, number, (50, 3))
    looks, without = 0, Room.without

    def counted(room: Room, counts: Counts) -> Room:
        nonlocal looks
        looks += 1
        return without(room, counts)

    monkeypatch.setattr(Room, "without", counted)
    pool.grant()
    assert len(pool.wants) == 100 and looks == 100, "not once for each pair of wants"
