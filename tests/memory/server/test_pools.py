"""Who gets blocks of a pool, in which order, and what is refused; the whole in any order is in `test_any_order`."""

import errno

import numpy as np
import pytest

from common.base.errors import MemoryShort
from common.memory.blocks.answers import Answer, ProtocolError
from common.memory.blocks.index import BlockIndex
from common.memory.blocks.lease_table import FREE, BlockState
from common.memory.blocks.offers import OfferKey
from common.memory.blocks.pool import User
from common.memory.client.demand import LACKING_S, PATIENCE_S
from common.memory.client.lease_cache import LeaseCache
from common.memory.devices.backing import Memory
from common.memory.server.pools import Pools
from common.memory.server.report import usage
from common.wire.messages.memory import (
    BlocksFreed,
    BlocksLeased,
    BlocksWanted,
    KVAccepted,
    KVDeclined,
    MemoryMessage,
    PoolShortage,
)
from common.wire.values.packing import pack_ids, unpack_ids
from common.wire.values.pool_shape import PoolShape
from tests.memory.parties import Bytes, offer_of
from tests.support.layouts import one_group

LAYOUT = one_group("model", 1, 1, 1, 1, "float16")  # 4 bytes a block
NUM_BLOCKS = 13
CAPACITY = NUM_BLOCKS - 1
ONE = PoolShape(LAYOUT, (NUM_BLOCKS,))


class Rig:
    """A pool with a prefill worker, 0, and a decode worker, 1; messages need no time."""

    def __init__(self, reserve: float = 0.0) -> None:
        self.made: list[Bytes] = []
        self.pools = Pools(self._allocate, reserve, poisons=False)
        for client, is_decoding in ((0, False), (1, True)):
            self.pools.want(User(client, (f"w{client}", 1), is_decoding), LAYOUT, (NUM_BLOCKS,))

    def _allocate(self, num_bytes: int) -> Memory:
        self.made.append(Bytes(num_bytes))
        return self.made[-1]

    def lease(self, client: int, count: int) -> BlocksLeased:
        [answer] = self.pools.handle(client, BlocksWanted((count,)))
        assert isinstance(answer.message, BlocksLeased) and answer.client == client
        return answer.message

    def free(self, client: int, leased: BlocksLeased) -> list[Answer]:
        return self.pools.handle(client, BlocksFreed(leased.block_ids, leased.generations))


def test_what_is_said_of_another_lease_of_a_block_or_of_anothers_is_refused_by_name() -> None:
    rig = Rig()
    first = rig.lease(0, 2)
    rig.free(0, first)
    second = rig.lease(0, 2)
    assert first.block_ids == second.block_ids[4:] + second.block_ids[:4] and first.generations != second.generations
    with pytest.raises(ProtocolError, match="of generation 2, not 1"):
        rig.free(0, first)
    with pytest.raises(ProtocolError, match="is LEASED, and not its own"):
        rig.free(1, second)
    with pytest.raises(ProtocolError, match=f"block {NUM_BLOCKS} of a pool of {NUM_BLOCKS}"):
        rig.pools.handle(0, BlocksFreed(pack_ids([NUM_BLOCKS]), pack_ids([1])))
    with pytest.raises(ProtocolError, match="named twice"):
        rig.pools.handle(0, BlocksFreed(second.block_ids * 2, second.generations * 2))
    with pytest.raises(ProtocolError, match="is FREE, and not its own"):
        rig.pools.handle(0, BlocksFreed(pack_ids([0]), pack_ids([0])))
    with pytest.raises(ProtocolError, match="not offered to it"):
        rig.pools.handle(1, KVAccepted("r", 0))
    with pytest.raises(ProtocolError, match="has \\(12,\\) to give"):
        rig.pools.handle(0, BlocksWanted((NUM_BLOCKS,)))
    with pytest.raises(ProtocolError, match="no pool"):
        rig.pools.handle(7, BlocksWanted((1,)))
    rig.free(0, second)


def test_who_decodes_comes_first_and_prompts_leave_it_a_reserve_to_grow_into() -> None:
    rig = Rig(reserve=0.25)  # 3 blocks
    decoding = rig.lease(1, 1)
    assert rig.pools.handle(0, BlocksWanted((9,))) == [Answer(client, PoolShortage(True)) for client in (0, 1)]
    rig.lease(1, 3)
    answers = rig.free(1, decoding)
    assert answers == [], "9 and the reserve are more than are free"
    [leased, *shortages] = rig.pools.handle(0, BlocksWanted((6,)))
    assert (leased.client, type(leased.message)) == (0, BlocksLeased)
    assert shortages == [Answer(client, PoolShortage(False)) for client in (0, 1)]


def test_without_anything_to_decode_a_prompt_may_fill_the_pool() -> None:
    rig = Rig(reserve=0.25)
    assert len(unpack_ids(rig.lease(0, CAPACITY).block_ids)) == CAPACITY


def test_an_offer_outlives_who_made_it_and_is_kept_when_who_it_is_for_dies_and_may_write_it() -> None:
    """As it may have accepted, and its word not have been sent."""
    rig = Rig()
    leased = rig.lease(0, 5)
    index = rig.pools.pools[LAYOUT].index
    offer = offer_of("w1", "r", unpack_ids(leased.block_ids), unpack_ids(leased.generations))
    assert rig.pools.handle(0, offer) == [Answer(1, offer)]
    rig.pools.leave(0)
    rig.pools.reclaim(0)
    assert usage(rig.pools).num_offered == 5 and index.num_free == (CAPACITY - 5,)
    rig.pools.handle(1, KVAccepted("r", 0))
    assert index.leases.num_leased[1] == 5
    rig.pools.want(User(2, ("w2", 1), False), LAYOUT, (5,))
    leased = rig.lease(2, 3)
    rig.pools.handle(2, offer_of("w1", "s", unpack_ids(leased.block_ids), unpack_ids(leased.generations)))
    rig.pools.leave(1)
    assert rig.pools.num_quarantined(1) == 8 and usage(rig.pools) == (CAPACITY, CAPACITY - 8, 0, 8)
    rig.pools.reclaim(1)
    assert index.num_free == (CAPACITY,)
    late = rig.lease(2, 2)
    refused = offer_of("w1", "t", unpack_ids(late.block_ids), unpack_ids(late.generations))
    assert rig.pools.handle(2, refused) == [Answer(2, KVDeclined("t", 0))]
    assert index.num_free == (CAPACITY,), "nobody is there to take it"


def test_who_says_nothing_of_what_it_was_offered_holds_up_who_waits_for_blocks() -> None:
    """So that the server ends it when it hangs, though it has no block of its own."""
    rig = Rig()
    leased = rig.lease(0, 5)
    rig.pools.handle(0, offer_of("w1", "r", unpack_ids(leased.block_ids), unpack_ids(leased.generations)))
    assert not rig.pools.holds_up_others(1), "nobody waits"
    rig.pools.handle(0, BlocksWanted((CAPACITY,)))
    assert rig.pools.holds_up_others(1) and not rig.pools.holds_up_others(0)


def test_a_pool_ends_with_its_last_user_and_not_before_that_one_writes_no_more() -> None:
    rig = Rig()
    leased = rig.lease(0, 5)
    for client in (1, 0):
        rig.pools.leave(client)
    rig.pools.reclaim(1)
    assert leased.block_ids and not rig.made[0].is_closed
    rig.pools.reclaim(0)
    assert rig.made[0].is_closed and not rig.pools.pools
    rig.pools.want(User(3, ("w3", 1), False), LAYOUT, (7,))
    assert usage(rig.pools) == (6, 6, 0, 0)


def test_a_pool_that_may_be_damaged_goes_to_nobody_who_comes_and_ends_with_those_who_are_there() -> None:
    rig = Rig()
    leased = rig.lease(1, 5)
    assert rig.pools.taint(0) == {0, 1} and rig.pools.taint(7) == set()
    rig.pools.want(User(2, ("w2", 1), True), LAYOUT, (NUM_BLOCKS,))
    assert len(rig.made) == 2 and rig.pools.of_client[2].pool_id != rig.pools.of_client[0].pool_id
    assert usage(rig.pools) == (2 * CAPACITY, 2 * CAPACITY - 5, 0, 0)
    assert rig.pools.taint(0) == {0, 1}, "as often as they say so"
    rig.free(1, leased)
    for client in (0, 1):
        rig.pools.leave(client)
    rig.pools.reclaim(0)
    assert not rig.made[0].is_closed
    rig.pools.reclaim(1)
    assert [memory.is_closed for memory in rig.made] == [True, False]
    assert len(unpack_ids(rig.lease(2, CAPACITY).block_ids)) == CAPACITY


def test_an_offer_to_who_does_not_decode_is_an_offer_to_nobody() -> None:
    rig = Rig()
    rig.pools.want(User(2, ("w2", 1), False), LAYOUT, (NUM_BLOCKS,))
    leased = rig.lease(0, 2)
    offer = offer_of("w2", "r", unpack_ids(leased.block_ids), unpack_ids(leased.generations))
    assert rig.pools.handle(0, offer) == [Answer(0, KVDeclined("r", 0))]
    assert usage(rig.pools) == (CAPACITY, CAPACITY, 0, 0)


def test_other_layouts_have_pools_of_their_own_and_blocks_beyond_reason_are_refused() -> None:
    rig = Rig()
    other = one_group("model", 2, 1, 1, 1, "float16")
    rig.pools.want(User(2, ("w2", 1), True), other, (5,))
    assert usage(rig.pools) == (CAPACITY + 4, CAPACITY + 4, 0, 0)
    with pytest.raises(ProtocolError, match="at most"):
        rig.pools.want(User(3, ("w3", 1), True), one_group("m", 1 << 16, 8, 1 << 10, 16, "float16"), (5,))


def test_without_room_nothing_is_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(num_bytes: int) -> Memory:
        raise MemoryShort("nothing is left")

    pools = Pools(refuse, 0.0, poisons=False)
    with pytest.raises(MemoryShort):
        pools.want(User(0, ("w0", 1), False), LAYOUT, (NUM_BLOCKS,))
    assert not pools.of_client and not pools.leave(0)

    def full(self: Bytes, offset: int, data: bytes | bytearray) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Bytes, "write", full)
    rig, made = Rig.__new__(Rig), list[Bytes]()
    rig.made = made
    with pytest.raises(MemoryShort, match="No space left"):
        Pools(rig._allocate, 0.0, poisons=False).want(User(0, ("w0", 1), False), LAYOUT, (NUM_BLOCKS,))
    assert made[0].is_closed
    monkeypatch.undo()
    monkeypatch.setattr(Bytes, "fill", lambda self, offset, num_bytes, byte: full(self, offset, b""))
    with pytest.raises(MemoryShort, match="No space left"):
        Pools(rig._allocate, 0.0, poisons=True).want(User(0, ("w0", 1), False), LAYOUT, (NUM_BLOCKS,))
    assert made[1].is_closed


def test_a_block_to_grow_into_never_waits_for_a_prompt() -> None:
    """Be it of another decode worker, which computes one, or in the same."""
    rig = Rig(reserve=0.25)
    rig.pools.want(User(2, ("w2", 1), True), LAYOUT, (NUM_BLOCKS,))
    rig.lease(1, 8)
    assert rig.pools.handle(1, BlocksWanted((9,))) == [Answer(client, PoolShortage(True)) for client in (0, 1, 2)]
    assert rig.pools.handle(0, BlocksWanted((4,))) == []
    assert len(unpack_ids(rig.lease(2, 1).block_ids)) == 1
    now_s, said = 0.0, list[MemoryMessage]()
    leases = LeaseCache(ONE, said.append, clock=lambda: now_s)
    leases.demand.shortage(is_short=True)
    for _ in range(3):
        assert not leases.fetch((9,))
        leases.update((0,), (0,))
        now_s += LACKING_S / 2
    assert not leases.fetch((1,))
    leases.update((0,), (0,))
    assert said == [BlocksWanted((9,)), BlocksWanted((1,))]
    leases.receive(BlocksLeased(pack_ids([1]), pack_ids([1])))
    assert not leases.fetch((9,)) and leases.fetch((1,)) and leases.allocate((1,)) == [[1]]
    assert not leases.fetch((9,))
    leases.update((0,), (0,))
    assert said.pop() == BlocksWanted((9,)), "and then the prompt's turn has come"
    assert not leases.fetch((1,))
    for _ in range(4):  # whoever lacked one is gone
        assert not leases.fetch((9,))
        now_s += LACKING_S / 2
        leases.update((0,), (0,))
    assert said[-1] == BlocksWanted((9,))


def test_what_somebody_lacked_is_kept_while_he_could_not_say_so_again() -> None:
    now_s, said = 0.0, list[MemoryMessage]()
    leases = LeaseCache(ONE, said.append, clock=lambda: now_s)
    assert not leases.fetch((9,))
    for turn in range(3):
        leases.update((0,), (0,), is_busy=True)
        if not turn:
            leases.receive(BlocksLeased(pack_ids(range(1, 10)), pack_ids([1] * 9)))
        now_s += 2 * LACKING_S
    assert leases.fetch((9,)) and said == [BlocksWanted((9,))]
    for _ in range(2):
        leases.update((0,), (0,))
        now_s += 2 * LACKING_S
    assert leases.num_free == (0,), "and no longer"


def test_who_lacks_more_than_a_moment_ago_is_heard_at_once() -> None:
    """As one does with every sequence that was admitted meanwhile, which needs a block to grow."""
    said = list[MemoryMessage]()
    leases = LeaseCache(ONE, said.append, clock=lambda: 0.0)
    assert not leases.fetch((2,))
    leases.update((0,), (0,))
    leases.receive(BlocksLeased(pack_ids([1, 2]), pack_ids([1, 1])))
    assert not leases.fetch((3,))
    leases.update((0,), (0,))
    assert said == [BlocksWanted((2,)), BlocksWanted((1,))]


def test_prompts_that_want_little_pass_one_that_wants_much_but_not_for_ever() -> None:
    rig = Rig()
    for client in (2, 3):
        rig.pools.want(User(client, (f"w{client}", 1), False), LAYOUT, (NUM_BLOCKS,))
    held = rig.lease(3, 4)
    rig.pools.handle(0, BlocksWanted((10,)))
    passing = [rig.lease(2, 2), rig.lease(2, 2)]
    assert rig.pools.handle(2, BlocksWanted((2,))) == [], "6 are more than half of 10"
    assert usage(rig.pools).num_free == 4
    assert rig.pools.handle(2, BlocksWanted((1,)))[0].client == 2, "5 are not"
    for blocks in passing:
        assert rig.free(2, blocks) == []
    [answer] = rig.free(3, held)[:1]
    assert answer.client == 0 and isinstance(answer.message, BlocksLeased)
    assert usage(rig.pools).num_free == 1 and not rig.pools.pools[LAYOUT].wants


def test_nobody_passes_what_is_wanted_to_go_on_decoding() -> None:
    rig = Rig()
    rig.lease(0, 8)
    rig.pools.handle(1, BlocksWanted((6,)))
    assert rig.pools.handle(0, BlocksWanted((1,))) == []


def test_generations_go_round() -> None:
    index, block_ids = BlockIndex(PoolShape(LAYOUT, (2,))), np.array([1])
    index.leases.generation[1] = (1 << 31) - 1
    assert index.lease(0, (1,)) == block_ids and index.leases.generation[1] == 1
    assert [index.leases.claim(0), index.leases.claim(1)] == [FREE, (BlockState.LEASED, 0)]
    index.offer(0, OfferKey(1, "r", 0), block_ids, index.leases.generation[block_ids], np.array([False]))
    assert index.leases.claim(1) == (BlockState.OFFERED, 1)
    index.accept(OfferKey(1, "r", 0))
    assert [index.leases.claim(0), index.leases.claim(1)] == [FREE, (BlockState.LEASED, 1)]


def test_what_is_lacking_is_kept_a_moment_and_a_shortage_is_told_from_a_late_answer() -> None:
    now_s, said = 0.0, list[MemoryMessage]()
    leases = LeaseCache(ONE, said.append, clock=lambda: now_s)
    leases.update((1,), (0,))
    assert said.pop() == BlocksWanted((2,))
    leases.receive(BlocksLeased(pack_ids([1, 2]), pack_ids([1, 1])))
    assert not leases.fetch((5,))
    leases.update((1,), (0,))
    assert said.pop() == BlocksWanted((3,))
    now_s = 5 * PATIENCE_S
    assert not leases.is_exhausted(), "the server has not answered yet"
    leases.demand.shortage(is_short=True)
    leases.update((1,), (0,))
    assert said == [BlocksWanted((5,)), BlocksFreed(pack_ids([2, 1]), pack_ids([1, 1]))], (
        "nobody waits for what it holds"
    )
    assert not leases.is_exhausted()
    now_s += 2 * PATIENCE_S
    assert leases.is_exhausted()
    said.clear()
    leases.receive(BlocksLeased(pack_ids(range(1, 6)), pack_ids([2] * 5)))
    leases.update((1,), (0,))
    assert said == [] and leases.num_free >= (5,), "it came, and is kept for who lacked it"
    now_s += 2 * LACKING_S
    leases.update((1,), (0,))
    assert [type(message) for message in said] == [BlocksFreed] and leases.num_free == (0,)
