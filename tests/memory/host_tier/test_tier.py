"""The host tier of a server: what it keeps, what comes back and to whom, and what becomes of it when all goes wrong."""

import logging
import time
from itertools import count

import numpy as np
import pytest
from msgspec.structs import replace

from common.base.errors import MemoryShort
from common.memory.base.host_ram import ram_bytes
from common.memory.base.slot_sizes import block_sizes
from common.memory.blocks.answers import Answer
from common.memory.blocks.event_log import EventLog
from common.memory.blocks.index import TIER
from common.memory.blocks.pool import Pool, User
from common.memory.devices.backing import HostPiece
from common.memory.devices.host_backing import HostBacking
from common.memory.host_tier.room import HostRoom
from common.memory.host_tier.slots import HostSlots
from common.memory.host_tier.tier import IDLE_S, make_tier
from common.memory.host_tier.traffic import STALL_S
from common.memory.server.pools import Pools
from common.settings.memory_sections import MemorySection
from common.wire.messages.memory import (
    BlocksFreed,
    BlocksLeased,
    BlocksSealed,
    BlocksWanted,
    PoolLeft,
    PromptBlocks,
    PromptWanted,
)
from common.wire.messages.memory_reports import BlockEvent
from common.wire.values.block_key import keys_in_group, pack_keys
from common.wire.values.fields import KEY_BYTES, SHORT_KEY_BYTES
from common.wire.values.kv_layout import KVLayout
from common.wire.values.packing import pack_ids, unpack_ids
from tests.memory.parties import Bytes
from tests.memory.tiers import ReadyRoom, slow_tier
from tests.support.layouts import one_group, state

LAYOUT = one_group("model", 1, 1, 1, 16, "float16")  # eight blocks are worth a restore
BLOCK_BYTES = LAYOUT.groups[0].block_bytes
NUM_BLOCKS, NUM_SLOTS = 25, 36
ALICE, BOB, CAROL = 0, 1, 2
BLOCK_US = 1000
DEADLINE_S = 60.0


class Rig:
    """A server's pools with a tier; Alice and Bob compute prompts, Carol decodes. Blocks of a text hold its number."""

    def __init__(self, num_slots: int = NUM_SLOTS, layout: KVLayout = LAYOUT) -> None:
        self.now_s = 0.0
        self.tier, self.copies = slow_tier(BLOCK_BYTES, num_slots, slots_a_piece=12, batch=4)
        self.tier.traffic._clock = self.tier._clock = lambda: self.now_s
        self.memories: list[Bytes] = []
        self.pools = Pools(self._allocate, 0.0, poisons=True, tier=self.tier)
        self.numbers = count()
        self.layout, self.num_asked = layout, 0
        for client in (ALICE, BOB, CAROL):
            self.join(client)

    def join(self, client: int, layout: KVLayout | None = None) -> None:
        user, layout = User(client, (f"w{client}", 1), is_decoding=client == CAROL), layout or self.layout
        self.pools.want(user, layout, (NUM_BLOCKS,) * len(layout.groups))

    @property
    def pool(self) -> Pool:
        return self.pools.of_client[ALICE]

    def lease(self, client: int, num_blocks: int) -> BlocksLeased:
        [answer] = self.pools.handle(client, BlocksWanted((num_blocks,)))
        assert isinstance(answer.message, BlocksLeased)
        return answer.message

    def compute(
        self, text: int, num_blocks: int, client: int = ALICE, content: int | None = None, *, is_copied: bool = False
    ) -> None:
        """Write and seal so many blocks, and let go of them, perhaps after they were copied."""
        leased = self.lease(client, num_blocks)
        for block_id in unpack_ids(leased.block_ids):
            self.pool.memory.fill(*self.pool.index.shape.place(block_id), text if content is None else content)
        keys = keys_of(text, num_blocks)
        self.pools.handle(client, BlocksSealed(leased.block_ids, leased.generations, keys))
        if is_copied:
            self.copy()
        self.pools.handle(client, BlocksFreed(leased.block_ids, leased.generations))

    def copy(self) -> list[Answer]:
        """All that is to be copied, either way; what is told in the end."""
        answers = self.pools.update()
        while self.tier.is_busy:
            self.copies.end()
            answers += self.pools.update()
        return answers

    def crowd_out(self, num_blocks: int = NUM_BLOCKS - 1) -> None:
        """Somebody uses these for a moment."""
        leased = self.lease(BOB, num_blocks)
        self.pools.handle(BOB, BlocksFreed(leased.block_ids, leased.generations))

    def keep(self, text: int, num_blocks: int) -> None:
        """A text that is in host memory only."""
        self.compute(text, num_blocks, is_copied=True)
        self.crowd_out()

    def ask(self, client: int, text: int, num_blocks: int, block_us: int = BLOCK_US) -> list[Answer]:
        """Want all blocks of a text; what is not found is to be filled."""
        self.num_asked += 1
        wanted = PromptWanted(f"r{self.num_asked}", 0, keys_of(text, num_blocks), block_us, (num_blocks,), 0)
        return self.pools.handle(client, wanted)

    def found(self, answers: list[Answer], client: int, text: int) -> list[int]:
        """Blocks of which a client is told, which hold that text; it gives the others back."""
        [found] = [answer.message for answer in answers if answer.client == client]
        assert isinstance(found, PromptBlocks)
        block_ids = unpack_ids(found.block_ids)
        fresh = block_ids[found.num_sealed :]
        del block_ids[found.num_sealed :]
        self.let_go(client, fresh)
        memory = self.memories[-1]
        for block_id in block_ids:
            offset, size = self.pool.index.shape.place(block_id)
            assert memory.content[offset : offset + size] == bytes([text]) * size
        return block_ids

    def let_go(self, client: int, block_ids: list[int]) -> None:
        ids = np.array(block_ids, np.intp)
        generations = self.pool.index.leases.generation[ids].tobytes()
        self.pools.handle(client, BlocksFreed(ids.astype(np.int32).tobytes(), generations))

    def all_come_free(self) -> None:
        """Nobody has blocks any more, the tier neither."""
        assert self.pool.index.num_free == (NUM_BLOCKS - 1,)

    def _allocate(self, num_bytes: int) -> Bytes:
        self.memories.append(Bytes(num_bytes))
        return self.memories[-1]


def keys_of(text: int, num_blocks: int) -> bytes:
    return pack_keys([bytes([text, number]).ljust(32, b".") for number in range(num_blocks)])


def keys_in_turn(text: int, num_blocks: int) -> list[bytes]:
    packed = keys_of(text, num_blocks)
    return [packed[at : at + KEY_BYTES] for at in range(0, len(packed), KEY_BYTES)]


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_what_the_pool_has_no_room_for_comes_back(rig: Rig) -> None:
    rig.keep(1, 10)
    assert rig.ask(ALICE, 1, 10) == [], "not before it is there"
    block_ids = rig.found(rig.copy(), ALICE, 1)
    assert len(block_ids) == 10
    rig.let_go(ALICE, block_ids)
    rig.all_come_free()
    assert rig.tier.traffic.num_restored == 10 and rig.tier.traffic.in_bytes == 10 * BLOCK_BYTES
    assert len(rig.found(rig.ask(BOB, 1, 10), BOB, 1)) == 10, "it is in the pool again"


def test_what_the_pool_has_is_not_copied_again_and_what_follows_is_restored(rig: Rig) -> None:
    rig.compute(1, 12)
    rig.copy()
    rig.crowd_out(NUM_BLOCKS - 1 - 3)  # the end of a text goes first
    assert rig.ask(ALICE, 1, 13) == []
    assert len(rig.found(rig.copy(), ALICE, 1)) == 12
    assert rig.tier.traffic.num_restored == 9


def test_two_who_want_the_same_share_one_restore(rig: Rig) -> None:
    rig.keep(1, 10)
    assert rig.ask(ALICE, 1, 10) == rig.ask(BOB, 1, 12) == rig.ask(BOB, 1, 4) == []
    answers = rig.copy()
    assert len(rig.found(answers, ALICE, 1)) == 10
    messages = [a.message for a in answers if a.client == BOB and isinstance(a.message, PromptBlocks)]
    bobs = [unpack_ids(message.block_ids)[: message.num_sealed] for message in messages]
    assert list(map(len, bobs)) == [10, 4] and bobs[0][:4] == bobs[1]
    assert rig.tier.traffic.num_restored == 10


def test_who_lacks_more_than_another_waits_for_waits_for_that_first(rig: Rig) -> None:
    """As a text may begin amid another."""
    rig.keep(1, 16)
    end = PromptWanted("r", 0, keys_of(1, 16)[8 * 16 :], BLOCK_US, (8,), 0)
    assert rig.pools.handle(ALICE, end) == []
    assert rig.ask(BOB, 1, 16) == []
    answers = rig.copy()
    assert len(rig.found(answers, ALICE, 1)) == 8 and len(rig.found(answers, BOB, 1)) == 16
    assert rig.tier.traffic.num_restored == 16


@pytest.mark.parametrize("num_blocks, block_us", [(7, BLOCK_US), (10, 0), (10, 101), (8, 100 + 1000 // 8)])
def test_what_is_not_worth_it_is_not_restored(rig: Rig, num_blocks: int, block_us: int) -> None:
    rig.keep(1, num_blocks)
    rig.tier.traffic.slot_us = 100.0
    assert rig.found(rig.ask(ALICE, 1, num_blocks, block_us), ALICE, 1) == []
    rig.all_come_free()


def test_a_text_that_has_no_room_yet_keeps_its_beginning_and_the_rest_follows(rig: Rig) -> None:
    room = rig.tier.room
    assert isinstance(room, ReadyRoom)
    room.num_ready = 1  # of twelve slots
    rig.compute(1, 20, is_copied=True)
    assert len(rig.tier.slots) == 12 and list(rig.tier.slots.slot_of) == keys_in_turn(1, 12)
    room.num_ready = room.num_pieces
    room.begin()
    rig.copy()
    assert len(rig.tier.slots) == 20
    rig.crowd_out()
    assert rig.ask(ALICE, 1, 20) == []
    assert len(rig.found(rig.copy(), ALICE, 1)) == 20


def test_host_memory_is_there_before_anything_was_sealed_but_not_while_workers_start(rig: Rig) -> None:
    rig.now_s = IDLE_S
    rig.pools.update()
    assert not rig.tier.room.is_made
    rig.now_s += 0.1
    rig.pools.update()
    rig.pools.update()
    assert rig.tier.room.is_made and rig.tier.slots.num_slots == NUM_SLOTS


def test_it_begins_when_there_is_room_for_all_of_the_prompt_and_nobody_waits_before(rig: Rig) -> None:
    rig.keep(1, 10)
    rest = rig.lease(BOB, 20)
    rig.ask(ALICE, 1, 10)
    assert not rig.copies.begun, "four are left"
    rig.pools.handle(CAROL, BlocksWanted((5,)))
    answers = rig.pools.handle(BOB, BlocksFreed(rest.block_ids[: 8 * 4], rest.generations[: 8 * 4]))
    [leased] = [answer for answer in answers if isinstance(answer.message, BlocksLeased)]
    rig.pools.update()
    assert leased.client == CAROL and not rig.copies.begun, "who decodes was first, and seven are left"
    rig.pools.handle(BOB, BlocksFreed(rest.block_ids[8 * 4 :], rest.generations[8 * 4 :]))
    told = [a for a in rig.copy() if isinstance(a.message, PromptBlocks)]
    assert len(rig.found(told, ALICE, 1)) == 10


def test_who_waits_for_blocks_gets_those_that_nobody_reads_when_they_have_come_back(rig: Rig) -> None:
    rig.keep(1, 10)
    assert rig.ask(ALICE, 1, 10) == []
    assert not any(isinstance(answer.message, BlocksLeased) for answer in rig.pools.handle(CAROL, BlocksWanted((20,))))
    rig.pools.handle(ALICE, PoolLeft(b"", b""))
    told = rig.copy()
    assert [answer.client for answer in told if isinstance(answer.message, BlocksLeased)] == [CAROL]


@pytest.mark.parametrize("is_killed", [True, False])
def test_who_goes_amid_a_restore_is_told_nothing_and_others_find_it(rig: Rig, is_killed: bool) -> None:
    rig.keep(1, 10)
    assert rig.ask(ALICE, 1, 10) == []
    rig.pools.update()
    in_flight = rig.pool.index.leases.num_leased[TIER]
    if is_killed:
        rig.pools.leave(ALICE)
        rig.pools.reclaim(ALICE)
    else:
        rig.pools.handle(ALICE, PoolLeft(b"", b""))
    assert rig.pools.of_client[BOB].index.leases.num_leased[TIER] == in_flight == 10, (
        "nobody gets what is being written"
    )
    assert not any(answer.client == ALICE for answer in rig.copy())
    rig.pools.of_client[ALICE] = rig.pools.of_client[BOB]
    assert len(rig.found(rig.ask(BOB, 1, 10), BOB, 1)) == 10


def test_what_waits_for_host_memory_does_not_pile_up(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rig.tier.room, "begin", lambda: None)  # there is none
    for text in range(10):
        rig.compute(text, 20)
        rig.pools.update()
    assert rig.tier.served is not None and len(rig.tier.served.spills.queue) == NUM_BLOCKS


def test_what_is_another_s_before_it_is_copied_is_not_kept(rig: Rig) -> None:
    rig.compute(1, 10)
    rig.pools.update()
    assert rig.copies.begun
    rig.crowd_out()
    rig.copy()
    assert not len(rig.tier.slots) and sorted(rig.tier.slots.free) == list(range(NUM_SLOTS))


def test_a_block_sealed_again_under_its_key_amid_a_copy_is_another(rig: Rig) -> None:
    rig.compute(1, 8)
    rig.pools.update()
    rig.crowd_out()
    rig.compute(1, 8, content=7)  # as if of another computation, in the same blocks
    rig.copies.end()
    rig.pools.update()
    content = {rig.tier.room.pieces[0].content[slot * BLOCK_BYTES] for slot in rig.tier.slots.slot_of.values()}
    assert content <= {7}


def test_the_first_of_a_key_is_kept_whatever_another_holds(rig: Rig) -> None:
    rig.compute(1, 10)
    rig.copy()
    rig.compute(1, 10, client=BOB, content=9)
    rig.copy()
    rig.crowd_out()
    rig.ask(ALICE, 1, 10)
    assert len(rig.found(rig.copy(), ALICE, 1)) == 10


def test_who_was_let_go_of_longest_ago_makes_room(rig: Rig) -> None:
    for text in (1, 2, 3):
        rig.keep(text, 12)
    rig.ask(ALICE, 1, 12)
    rig.let_go(ALICE, rig.found(rig.copy(), ALICE, 1))  # the first was wanted again
    rig.keep(4, 8)
    kept = {text: sum(key[0] == text for key in rig.tier.slots.slot_of) for text in (1, 2, 3, 4)}
    assert kept == {1: 12, 2: 4, 3: 12, 4: 8}
    assert {key[1] for key in rig.tier.slots.slot_of if key[0] == 2} == {0, 1, 2, 3}, "the end of it has gone"


def test_a_text_longer_than_the_tier_does_no_harm() -> None:
    rig = Rig(num_slots=12)
    rig.keep(1, 20)
    assert len(rig.tier.slots) == 12
    answers = rig.ask(ALICE, 1, 20) or rig.copy()
    rig.let_go(ALICE, rig.found(answers, ALICE, 1))
    rig.all_come_free()


def test_a_block_larger_than_the_tier_keeps_none_from_it() -> None:
    layout = KVLayout("model", (*LAYOUT.groups, state(1000)))
    rig = Rig(num_slots=12, layout=layout)
    assert max(block_sizes(layout)) > 12
    [leased] = [each.message for each in rig.pools.handle(ALICE, BlocksWanted((10, 1)))]
    assert isinstance(leased, BlocksLeased)
    keys = keys_of(1, 10) + keys_in_group(keys_of(1, 10)[-16:], 1)
    by_age = [*unpack_ids(leased.block_ids)][::-1]
    generations = [*unpack_ids(leased.generations)][::-1]
    backwards = b"".join([keys[at : at + 16] for at in range(0, len(keys), 16)][::-1])
    rig.pools.handle(ALICE, BlocksSealed(pack_ids(by_age), pack_ids(generations), backwards))
    rig.copy()
    assert rig.tier.served is not None and not rig.tier.served.spills.queue
    assert set(rig.tier.slots.slot_of) == set(keys_in_turn(1, 10))


def test_after_a_fault_nothing_is_left_of_it_and_the_next_pool_has_it(rig: Rig) -> None:
    rig.keep(1, 10)
    rig.compute(2, 4)
    rig.ask(ALICE, 1, 10)
    rig.pools.update()
    assert rig.pools.taint(ALICE) == {ALICE, BOB, CAROL}
    assert not rig.copies.begun and not len(rig.tier.slots)
    assert rig.pools.update() == []
    rig.join(9)
    assert rig.tier.served is not None and rig.tier.served.pool is rig.pools.of_client[9]
    for client in (ALICE, BOB, CAROL):
        rig.pools.leave(client)
        rig.pools.reclaim(client)
    assert rig.tier.served is not None, "the old pool's end is not the new one's"
    assert rig.memories[0].is_closed and not rig.memories[1].is_closed


def test_it_outlives_a_pool_for_the_next_one_of_that_layout_only(rig: Rig) -> None:
    def all_leave() -> None:
        for client in list(rig.pools.of_client):
            rig.pools.leave(client)
            rig.pools.reclaim(client)

    rig.keep(1, 10)
    rig.compute(2, 4)
    rig.pools.update()
    all_leave()
    assert rig.memories[0].is_closed and not rig.copies.begun
    rig.join(ALICE)
    assert rig.ask(ALICE, 1, 10) == []
    assert len(rig.found(rig.copy(), ALICE, 1)) == 10
    other = replace(LAYOUT, fingerprint="another")
    rig.join(7, other)
    assert rig.tier.layout == LAYOUT, "one pool at a time"
    all_leave()
    for client in (ALICE, BOB):
        rig.join(client, other)
    assert rig.tier.layout == other and not len(rig.tier.slots)
    rig.keep(1, 10)
    assert len(rig.tier.slots) == 10


@pytest.mark.parametrize("problem", ["it fails", ""])
def test_copies_that_fail_or_never_end_are_the_end_of_it_alone(rig: Rig, problem: str) -> None:
    rig.keep(1, 10)
    rig.compute(2, 3)
    rig.ask(ALICE, 2, 3)
    assert rig.ask(ALICE, 1, 10) == []
    rig.pools.update()
    rig.copies.problem = problem
    rig.now_s += STALL_S + 1
    assert rig.found(rig.pools.update(), ALICE, 1) == []
    assert rig.pool.index.leases.num_leased[TIER] == 10, "they may still be written, so nobody gets them"
    assert rig.pool.index.num_free == (NUM_BLOCKS - 1 - 10 - 3,)
    assert rig.found(rig.ask(BOB, 1, 10), BOB, 1) == []
    rig.copies.problem = ""
    rig.compute(3, 4)
    assert rig.copy() == [] and not rig.tier.is_busy
    rig.pools.close()


def test_the_router_is_told_what_is_there_only_and_when_it_is_not_any_more(rig: Rig) -> None:
    heard, log = Heard(), rig.pool.index.sealed.log
    rig.keep(1, 10)
    log.begin()
    heard.hear_all(log)
    assert (heard.there, heard.parked, heard.copy_us) == (set(), keys_in(1, 10), 1)
    rig.ask(ALICE, 1, 10)
    rig.let_go(ALICE, rig.found(rig.copy(), ALICE, 1))
    heard.hear_all(log)
    assert (heard.there, heard.parked) == (keys_in(1, 10), set())
    rig.crowd_out()
    heard.hear_all(log)
    assert (heard.there, heard.parked) == (set(), keys_in(1, 10))
    for text in (2, 3, 4):
        rig.keep(text, 12)
    heard.hear_all(log)
    assert not heard.parked & keys_in(1, 10), "others have its slots"
    assert heard.parked == {key[:2] for key in rig.tier.slots.slot_of}
    rig.copies.problem = "it fails"
    rig.compute(5, 3)
    rig.pools.update()
    rig.pools.update()
    heard.hear_all(log)
    assert rig.tier.is_lost and (heard.there, heard.parked) == (keys_in(5, 3), set())


def test_the_next_pool_tells_what_outlived_the_last_one(rig: Rig) -> None:
    rig.keep(1, 10)
    for client in (ALICE, BOB, CAROL):
        rig.pools.leave(client)
        rig.pools.reclaim(client)
    rig.join(ALICE)
    heard = Heard()
    rig.pool.index.sealed.log.begin()
    heard.hear_all(rig.pool.index.sealed.log)
    assert (heard.there, heard.parked) == (set(), keys_in(1, 10))


class Heard:
    """Where blocks are, as a log tells: beginnings of their keys."""

    def __init__(self) -> None:
        self.there, self.parked, self.copy_us, self.expected = set[bytes](), set[bytes](), 0, 0

    def hear_all(self, log: EventLog) -> None:
        while log.has_news:
            told = log.take()
            if told.sequence not in (0, self.expected):
                log.begin()
                continue
            self.expected = told.sequence + 1
            if not told.sequence:
                self.there, self.parked = set(), set()
            self.copy_us = told.copy_us
            keys = [told.keys[begin : begin + 2] for begin in range(0, len(told.keys), SHORT_KEY_BYTES)]
            for kind, length in zip(told.kinds, unpack_ids(told.runs), strict=True):
                some, keys = set(keys[:length]), keys[length:]
                self.there = self.there | some if kind == BlockEvent.SEALED else self.there - some
                self.parked = self.parked | some if kind == BlockEvent.PARKED else self.parked - some


def keys_in(text: int, num_blocks: int) -> set[bytes]:
    return {bytes([text, number]) for number in range(num_blocks)}


def test_a_pool_whose_blocks_cannot_be_used_again_has_none() -> None:
    rig = Rig(layout=KVLayout("model", (state(3),)))
    assert rig.tier.served is None and rig.pools.update() == []


def test_the_log_says_when_it_is_too_small(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        Rig(num_slots=36)
        assert "36 KV blocks" in caplog.text and "1.5 times the pool, which adds little" in caplog.text
        caplog.clear()
        Rig(num_slots=48)
        assert "2.0 times the pool" in caplog.text and "little" not in caplog.text


def test_it_is_no_larger_than_the_host_s_memory(caplog: pytest.LogCaptureFixture) -> None:
    tier = make_tier(HostBacking(), MemorySection(host_tier_bytes=1 << 44))
    assert tier is not None and tier.room.num_pieces * tier.room.piece_bytes <= ram_bytes()
    assert "memory.host_tier_bytes = 17592186044416: it will have " in caplog.text


class TestSlots:
    def test_neighbours_first_and_what_goes_is_found_no_more(self) -> None:
        slots = HostSlots(8)
        slots.grow(3)
        assert slots.take([1] * 5) == [[0], [1], [2]]
        slots.put([[0], [1], [2]], [b"a" * 16, b"b" * 16, b"c" * 16])
        slots.hold(np.array([2]))
        assert slots.take([1] * 3) == [[0], [1]], "what is read stays"
        assert slots.slot_of == {b"c" * 16: 2}
        slots.grow(2)
        assert slots.take([1] * 2) == [[3], [4]]

    def test_a_large_block_takes_slots_anywhere_and_the_oldest_make_room(self) -> None:
        slots = HostSlots(8, largest=3)
        slots.grow(6)
        for size, key in ((1, b"a"), (3, b"b"), (1, b"c")):
            slots.put(slots.take([size]), [key * 16])
        assert slots.all_of(1) == [1, 2, 3] and slots.free == [5]
        assert slots.take([3]) == [[5, 0, 1]] and slots.slot_of == {b"c" * 16: 4}
        slots.put([[5, 0, 1]], [b"c" * 16])
        assert sorted(slots.free) == [0, 1, 2, 3, 5], "of one key one is kept"
        slots.put(slots.take([3]), [b"d" * 16])
        assert len(slots.take([3, 3])) == 2 and not slots.slot_of

    def test_nothing_is_evicted_for_a_block_that_does_not_fit_then(self) -> None:
        slots, gone = HostSlots(8, largest=6), list[int]()
        slots.on_gone = lambda keys: gone.append(len(keys))
        slots.grow(8)
        for key in (b"a", b"b", b"c"):
            slots.put(slots.take([2]), [key * 16])
        slots.hold(np.array([0]))
        assert slots.take([9]) == [] and slots.take([7]) == [] and len(slots) == 3 and not gone
        assert len(slots.take([1, 4, 4])) == 2 and gone == [2], "they go at once, and not for the last"
        assert list(slots.slot_of) == [b"a" * 16]

    def test_of_one_key_one_is_kept(self) -> None:
        slots = HostSlots(4)
        slots.grow(4)
        slots.put(slots.take([1]), [b"a" * 16])
        slots.put(slots.take([1]), [b"a" * 16])
        assert len(slots) == 1 and sorted(slots.free) == [1, 2, 3]


class TestRoom:
    def grown(self, room: HostRoom) -> int:
        room.begin()
        end_s = time.monotonic() + DEADLINE_S
        while not room.is_made and time.monotonic() < end_s:
            time.sleep(0.01)
        room.grow()
        num_pieces = len(room.pieces)
        room.close()
        assert not room.pieces
        return num_pieces

    def test_it_grows_to_its_size(self) -> None:
        room = HostRoom(300 << 20, self.piece, left_bytes=lambda: 1 << 40)
        assert self.grown(room) == room.num_pieces == 4

    def test_what_cannot_be_had_is_said_once_and_the_rest_is_used(self, caplog: pytest.LogCaptureFixture) -> None:
        made: list[int] = []

        def make(num_bytes: int) -> HostPiece:
            if len(made) == 2:
                raise MemoryShort("cudaHostRegister of 67 MB: cudaErrorMemoryAllocation")
            made.append(num_bytes)
            return self.piece(1)

        assert self.grown(HostRoom(1 << 30, make, left_bytes=lambda: 1 << 40)) == 2
        [record] = [record for record in caplog.records if record.levelname == "WARNING"]
        assert "stays at 0.13 GB: cudaHostRegister of 67 MB" in record.getMessage()

    def test_it_leaves_something_to_others(self, caplog: pytest.LogCaptureFixture) -> None:
        left = iter([1 << 40, 1 << 40, 1000])
        assert self.grown(HostRoom(1 << 30, self.piece, left_bytes=lambda: next(left))) == 2
        assert "0.00 GB more of host memory can be had; lower memory.host_tier_bytes" in caplog.text

    @staticmethod
    def piece(num_bytes: int) -> HostPiece:
        return HostPiece(np.zeros(1, np.uint8))
