"""Workers and the owner of their pool, in any order of messages, deaths and late writes: no block is ever two's."""

import errno
from collections import Counter, deque
from dataclasses import dataclass, field
from itertools import chain

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.errors import MemoryShort
from common.memory.backing import Memory
from common.memory.block_index import FREE, BlockIndex, BlockState, OfferKey
from common.memory.exchange import Answer, Misbehaved
from common.memory.magazine import LACKING_S, PATIENCE_S, Magazine
from common.memory.pattern import pattern
from common.memory.pools import NAN_BYTE, Pools, User
from common.wire.kv_layout import Counts, KVLayout
from common.wire.memory_messages import (
    BlocksFreed,
    BlocksLeased,
    BlocksWanted,
    KVAccepted,
    KVDeclined,
    KVOffer,
    MemoryMessage,
    OfBlocks,
    PoolLeft,
    PoolRegion,
    PoolShortage,
)
from common.wire.packing import pack_ids, unpack_ids
from common.wire.pool_shape import PoolShape
from common.wire.sampling_params import SamplingParams
from tests.layouts import one_group, state, window

LAYOUT = one_group("model", 1, 1, 1, 1, "float16")  # 4 bytes a block
NUM_BLOCKS = 13
CAPACITY = NUM_BLOCKS - 1
ONE = PoolShape(LAYOUT, (NUM_BLOCKS,))
TWO = PoolShape(KVLayout("model", (LAYOUT.groups[0], window(1, 3, 2))), (NUM_BLOCKS, 6))
THREE = PoolShape(KVLayout("model", (LAYOUT.groups[0], window(1, 3, 2), state(5))), (8, 6, 4))


class Bytes:
    """Memory that can be looked at."""

    handle, descriptor = b"handle", None

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes, self.content, self.is_closed = num_bytes, bytearray(num_bytes), False

    def write(self, offset: int, data: bytes | bytearray) -> None:
        assert not self.is_closed and offset + len(data) <= self.num_bytes
        self.content[offset : offset + len(data)] = data

    def fill(self, offset: int, num_bytes: int, byte: int) -> None:
        self.write(offset, bytes([byte]) * num_bytes)

    def seal(self) -> None:
        raise AssertionError("a pool is written for ever")

    def close(self) -> None:
        assert not self.is_closed
        self.is_closed = True


@dataclass(eq=False)
class Worker:
    """One incarnation, with what it believes; messages in both directions take their time."""

    client: int
    is_decoding: bool
    shape: PoolShape
    said: deque[MemoryMessage] = field(default_factory=deque)
    heard: deque[MemoryMessage] = field(default_factory=deque)
    sequences: list[list[int]] = field(default_factory=list)
    offered: list[KVOffer] = field(default_factory=list)
    is_dead: bool = False
    now_s: float = 0.0

    def __post_init__(self) -> None:
        self.magazine = Magazine(self.shape, self.said.append, clock=lambda: self.now_s)

    @property
    def writable(self) -> set[int]:
        """Blocks that this worker may write, at hand or in use."""
        return set(self.magazine.leases)


class Machine(RuleBasedStateMachine):
    shape = ONE

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Bytes] = []
        self.pools = Pools(self._allocate, 0.2, poisons=True)
        self.workers: list[Worker] = []
        self.num_offers = 0
        for is_decoding in (False, True):
            self._start(is_decoding)

    def _allocate(self, num_bytes: int) -> Memory:
        self.made.append(Bytes(num_bytes))
        return self.made[-1]

    def _start(self, is_decoding: bool) -> None:
        worker = Worker(sum(1 for _ in self.workers), is_decoding, self.shape)
        self.workers.append(worker)
        user = User(worker.client, (f"w{worker.client}", 1), is_decoding)
        self._answer(self.pools.want(user, self.shape.layout, self.shape.num_blocks))

    def _answer(self, answers: list[Answer]) -> None:
        for answer in answers:
            worker = self.workers[answer.client]
            if not worker.is_dead:
                worker.heard.append(answer.message)

    def _alive(self, is_decoding: bool | None = None) -> list[Worker]:
        return [w for w in self.workers if not w.is_dead and is_decoding in (None, w.is_decoding)]

    def _server_reads(self, worker: Worker) -> None:
        message = worker.said.popleft()
        assert isinstance(message, OfBlocks), message
        self._answer(self.pools.heed(worker.client, message))

    def _worker_reads(self, worker: Worker) -> None:
        match worker.heard.popleft():
            case BlocksLeased() as leased:
                worker.magazine.leased(leased)
                for block_id in unpack_ids(leased.block_ids):
                    at, size = self.shape.place(block_id)
                    content = self.made[-1].content[at : at + size]
                    assert content == bytes([NAN_BYTE]) * size, "somebody wrote what is free"
            case PoolShortage(is_short):
                worker.magazine.shortage(is_short=is_short)
            case KVOffer() as offer:
                worker.offered.append(offer)
            case PoolRegion() | KVDeclined():
                pass
            case other:
                raise AssertionError(other)

    # --- what may happen ----------------------------------------------------------------------------

    @rule(index=st.integers(0, 9), to_server=st.booleans(), count=st.integers(1, 4))
    def messages_arrive(self, index: int, to_server: bool, count: int) -> None:
        alive = self._alive()
        if alive:
            worker = alive[index % len(alive)]
            for _ in range(min(count, len(worker.said if to_server else worker.heard))):
                self._server_reads(worker) if to_server else self._worker_reads(worker)

    @rule(index=st.integers(0, 9), numbers=st.tuples(*[st.integers(0, CAPACITY)] * 3))
    def begin(self, index: int, numbers: Counts) -> None:
        alive = self._alive()
        counts = tuple(map(min, numbers, self.shape.capacity))
        if alive and any(counts) and (worker := alive[index % len(alive)]).magazine.fetch(counts):
            worker.sequences.append(list(chain.from_iterable(worker.magazine.allocate(counts))))

    @rule(index=st.integers(0, 9))
    def write(self, index: int) -> None:
        """Also what a dead worker's device has not done yet."""
        worker = self.workers[index % len(self.workers)]
        for block_id in (block_id for sequence in worker.sequences for block_id in sequence):
            at, size = self.shape.place(block_id)
            self.made[-1].write(at, bytes([worker.client]) * size)

    @rule(index=st.integers(0, 9))
    def end(self, index: int) -> None:
        alive = [worker for worker in self._alive() if worker.sequences]
        if alive:
            worker = alive[index % len(alive)]
            worker.magazine.free(worker.sequences.pop(0))

    @rule(index=st.integers(0, 9), to=st.integers(0, 9))
    def hand_over(self, index: int, to: int) -> None:
        """To any decode worker that there ever was."""
        givers = [worker for worker in self._alive(False) if worker.sequences]
        takers = [worker for worker in self.workers if worker.is_decoding]
        if givers:
            giver, taker = givers[index % len(givers)], takers[to % len(takers)]
            block_ids = giver.sequences.pop()
            generations = giver.magazine.release(block_ids).tolist()
            self.num_offers += 1
            giver.said.append(offer_of(taker.client, f"r{self.num_offers}", block_ids, generations))

    @rule(index=st.integers(0, 9), accepts=st.booleans())
    def take_over(self, index: int, accepts: bool) -> None:
        takers = [worker for worker in self._alive(True) if worker.offered]
        if takers:
            taker = takers[index % len(takers)]
            offer = taker.offered.pop(0)
            if accepts:
                block_ids = unpack_ids(offer.block_ids)
                taker.magazine.adopt(block_ids, unpack_ids(offer.generations))
                taker.said.append(KVAccepted(offer.request_id, offer.attempt))
                taker.sequences.append(block_ids)
            else:
                taker.said.append(KVDeclined(offer.request_id, offer.attempt))

    @rule(index=st.integers(0, 9), level=st.integers(0, 4))
    def tend(self, index: int, level: int) -> None:
        alive = self._alive()
        if alive:
            worker = alive[index % len(alive)]
            floor = len(worker.sequences) if worker.is_decoding else 0
            worker.magazine.tend(*(tuple(min(each, count) for count in self.shape.capacity) for each in (level, floor)))

    @rule(index=st.integers(0, 9), num_unread=st.integers(0, 3))
    def die(self, index: int, num_unread: int) -> None:
        """What it has said is read first, but for what was not sent yet."""
        alive = self._alive()
        if len(alive) > 1:
            worker = alive[index % len(alive)]
            while len(worker.said) > num_unread:
                self._server_reads(worker)
            worker.is_dead = True
            self._answer(self.pools.leave(worker.client))

    @rule(index=st.integers(0, 9))
    def leave(self, index: int) -> None:
        """In order, perhaps amid something that its device does; what it is sent meanwhile it does not read."""
        alive = self._alive()
        if len(alive) > 1:
            worker = alive[index % len(alive)]
            block_ids = worker.magazine.in_use
            worker.said.append(PoolLeft(pack_ids(block_ids), worker.magazine.generations(block_ids).tobytes()))
            while worker.said:
                self._server_reads(worker)
            worker.is_dead = True
            self._answer(self.pools.leave(worker.client))
            assert self.pools.num_quarantined(worker.client) == len(block_ids)

    @rule(index=st.integers(0, 9))
    def process_is_over(self, index: int) -> None:
        dying = [worker for worker in self.workers if worker.is_dead and worker.client in self.pools.of_client]
        if dying:
            worker = dying[index % len(dying)]
            worker.sequences.clear()
            self._answer(self.pools.cure(worker.client))

    @precondition(lambda self: len(self._alive()) < 4 and len(self.workers) < 9)
    @rule(is_decoding=st.booleans())
    def start(self, is_decoding: bool) -> None:
        self._start(is_decoding)

    # --- what always holds --------------------------------------------------------------------------

    @invariant()
    def no_block_is_two_workers(self) -> None:
        """Nor can it become: what a dead one's device may still write nobody gets."""
        index = self.pools.pools[self.shape.layout].index
        writers: Counter[int] = Counter()
        for worker in self.workers:
            if not worker.is_dead:
                writers.update(worker.writable)
                worker.magazine.check(worker.sequences)
            elif worker.client in self.pools.of_client:
                written = list(chain.from_iterable(worker.sequences))
                writers.update(written)
                assert all(index.claims[block_id].state is BlockState.QUARANTINED for block_id in written)
        assert not writers or max(writers.values()) == 1, writers

    @invariant()
    def every_block_is_somewhere_once(self) -> None:
        index, proof_ids = self.pools.pools[self.shape.layout].index, self.shape.proof_ids
        states = Counter(claim.state for claim in index.claims)
        free_ids = list(chain.from_iterable(index.free_ids))
        assert states[BlockState.FREE] - len(proof_ids) == sum(index.num_free) == len(set(free_ids))
        assert self.shape.by_group(free_ids) == index.free_ids
        assert states[BlockState.LEASED] == index.num_leased.total()
        assert states[BlockState.OFFERED] == index.num_offered
        assert states[BlockState.QUARANTINED] == index.num_quarantined.total()
        for proof_id in proof_ids:
            at, size = self.shape.place(proof_id)
            assert index.claims[proof_id] == FREE and proof_id not in free_ids
            expected = pattern(self.pools.pools[self.shape.layout].pool_id, proof_id, size)
            assert self.made[-1].content[at : at + size] == expected

    def teardown(self) -> None:
        """Who is left can have the whole pool in the end, whatever the others did."""
        for worker in self.workers:
            if worker.is_dead and worker.client in self.pools.of_client:
                self._answer(self.pools.cure(worker.client))
        last = self._alive()[0]
        for turn in range(40):
            while any(worker.said or worker.heard for worker in self._alive()):
                for worker in self._alive():
                    self._hear_all(worker)
            for worker in self._alive():
                self._let_everything_go(worker)
            if turn > 8 and last.magazine.fetch(self.shape.capacity):
                return
            for worker in self._alive():
                worker.now_s += LACKING_S / 2
                worker.magazine.tend(tuple(min(2, count) for count in self.shape.capacity), self.shape.layout.nothing)
        raise AssertionError(f"{last.magazine.num_free} of {self.shape.capacity} blocks at hand in the end")

    def _hear_all(self, worker: Worker) -> None:
        while worker.said:
            self._server_reads(worker)
        while worker.heard:
            self._worker_reads(worker)

    def _let_everything_go(self, worker: Worker) -> None:
        while worker.sequences:
            worker.magazine.free(worker.sequences.pop())
        while worker.offered:
            offer = worker.offered.pop()
            worker.said.append(KVDeclined(offer.request_id, offer.attempt))


class MachineOfTwo(Machine):
    shape = TWO


class MachineOfThree(Machine):
    shape = THREE


for machine in (Machine, MachineOfTwo, MachineOfThree):
    machine.TestCase.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)
test_no_block_is_ever_two_workers = Machine.TestCase
test_no_block_of_two_groups_is_ever_two_workers = MachineOfTwo.TestCase
test_no_block_of_three_groups_is_ever_two_workers = MachineOfThree.TestCase


def offer_of(client: int, request_id: str, block_ids: list[int], generations: list[int]) -> KVOffer:
    ids = pack_ids(block_ids), pack_ids(generations)
    return KVOffer(f"w{client}", 1, request_id, 0, pack_ids([1, 2]), 1, SamplingParams(), *ids)


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
        [answer] = self.pools.want_blocks(client, (count,))
        assert isinstance(answer.message, BlocksLeased) and answer.client == client
        return answer.message

    def free(self, client: int, leased: BlocksLeased) -> list[Answer]:
        return self.pools.freed(client, BlocksFreed(leased.block_ids, leased.generations))


def test_what_is_said_of_another_lease_of_a_block_or_of_anothers_is_refused_by_name() -> None:
    rig = Rig()
    first = rig.lease(0, 2)
    rig.free(0, first)
    second = rig.lease(0, 2)
    assert first.block_ids == second.block_ids[4:] + second.block_ids[:4] and first.generations != second.generations
    with pytest.raises(Misbehaved, match="of generation 2, not 1"):
        rig.free(0, first)
    with pytest.raises(Misbehaved, match="is LEASED, and not its own"):
        rig.free(1, second)
    with pytest.raises(Misbehaved, match=f"block {NUM_BLOCKS} of a pool of {NUM_BLOCKS}"):
        rig.pools.freed(0, BlocksFreed(pack_ids([NUM_BLOCKS]), pack_ids([1])))
    with pytest.raises(Misbehaved, match="named twice"):
        rig.pools.freed(0, BlocksFreed(second.block_ids * 2, second.generations * 2))
    with pytest.raises(Misbehaved, match="is FREE, and not its own"):
        rig.pools.freed(0, BlocksFreed(pack_ids([0]), pack_ids([0])))
    with pytest.raises(Misbehaved, match="not offered to it"):
        rig.pools.accepted(1, KVAccepted("r", 0))
    with pytest.raises(Misbehaved, match="has \\(12,\\) to give"):
        rig.pools.want_blocks(0, (NUM_BLOCKS,))
    with pytest.raises(Misbehaved, match="no pool"):
        rig.pools.want_blocks(7, (1,))
    rig.free(0, second)


def test_who_decodes_comes_first_and_prompts_leave_it_a_reserve_to_grow_into() -> None:
    rig = Rig(reserve=0.25)  # 3 blocks
    decoding = rig.lease(1, 1)
    assert rig.pools.want_blocks(0, (9,)) == [Answer(client, PoolShortage(True)) for client in (0, 1)]
    rig.lease(1, 3)
    answers = rig.free(1, decoding)
    assert answers == [], "9 and the reserve are more than are free"
    [leased, *shortages] = rig.pools.want_blocks(0, (6,))
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
    offer = offer_of(1, "r", unpack_ids(leased.block_ids), unpack_ids(leased.generations))
    assert rig.pools.offered(0, offer) == [Answer(1, offer)]
    rig.pools.leave(0)
    rig.pools.cure(0)
    assert index.num_offered == 5 and index.num_free == (CAPACITY - 5,)
    rig.pools.accepted(1, KVAccepted("r", 0))
    assert index.num_leased[1] == 5
    rig.pools.want(User(2, ("w2", 1), False), LAYOUT, (5,))
    leased = rig.lease(2, 3)
    rig.pools.offered(2, offer_of(1, "s", unpack_ids(leased.block_ids), unpack_ids(leased.generations)))
    rig.pools.leave(1)
    assert rig.pools.num_quarantined(1) == 8 and rig.pools.usage() == (CAPACITY, CAPACITY - 8, 0, 8)
    rig.pools.cure(1)
    assert index.num_free == (CAPACITY,)
    late = rig.lease(2, 2)
    refused = offer_of(1, "t", unpack_ids(late.block_ids), unpack_ids(late.generations))
    assert rig.pools.offered(2, refused) == [Answer(2, KVDeclined("t", 0))]
    assert index.num_free == (CAPACITY,), "nobody is there to take it"


def test_a_pool_ends_with_its_last_user_and_not_before_that_one_writes_no_more() -> None:
    rig = Rig()
    leased = rig.lease(0, 5)
    for client in (1, 0):
        rig.pools.leave(client)
    rig.pools.cure(1)
    assert leased.block_ids and not rig.made[0].is_closed
    rig.pools.cure(0)
    assert rig.made[0].is_closed and not rig.pools.pools
    rig.pools.want(User(3, ("w3", 1), False), LAYOUT, (7,))
    assert rig.pools.usage() == (6, 6, 0, 0)


def test_a_pool_that_may_be_damaged_goes_to_nobody_who_comes_and_ends_with_those_who_are_there() -> None:
    rig = Rig()
    leased = rig.lease(1, 5)
    assert rig.pools.taint(0) == {0, 1} and rig.pools.taint(7) == set()
    rig.pools.want(User(2, ("w2", 1), True), LAYOUT, (NUM_BLOCKS,))
    assert len(rig.made) == 2 and rig.pools.of_client[2].pool_id != rig.pools.of_client[0].pool_id
    assert rig.pools.usage() == (2 * CAPACITY, 2 * CAPACITY - 5, 0, 0)
    assert rig.pools.taint(0) == {0, 1}, "as often as they say so"
    rig.free(1, leased)
    for client in (0, 1):
        rig.pools.leave(client)
    rig.pools.cure(0)
    assert not rig.made[0].is_closed
    rig.pools.cure(1)
    assert [memory.is_closed for memory in rig.made] == [True, False]
    assert len(unpack_ids(rig.lease(2, CAPACITY).block_ids)) == CAPACITY


def test_an_offer_to_who_does_not_decode_is_an_offer_to_nobody() -> None:
    rig = Rig()
    rig.pools.want(User(2, ("w2", 1), False), LAYOUT, (NUM_BLOCKS,))
    leased = rig.lease(0, 2)
    offer = offer_of(2, "r", unpack_ids(leased.block_ids), unpack_ids(leased.generations))
    assert rig.pools.offered(0, offer) == [Answer(0, KVDeclined("r", 0))]
    assert rig.pools.usage() == (CAPACITY, CAPACITY, 0, 0)


def test_other_layouts_have_pools_of_their_own_and_blocks_beyond_reason_are_refused() -> None:
    rig = Rig()
    other = one_group("model", 2, 1, 1, 1, "float16")
    rig.pools.want(User(2, ("w2", 1), True), other, (5,))
    assert rig.pools.usage() == (CAPACITY + 4, CAPACITY + 4, 0, 0)
    with pytest.raises(Misbehaved, match="at most"):
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
    assert rig.pools.want_blocks(1, (9,)) == [Answer(client, PoolShortage(True)) for client in (0, 1, 2)]
    assert rig.pools.want_blocks(0, (4,)) == []
    assert len(unpack_ids(rig.lease(2, 1).block_ids)) == 1
    now_s, said = 0.0, list[MemoryMessage]()
    magazine = Magazine(ONE, said.append, clock=lambda: now_s)
    magazine.shortage(is_short=True)
    for _ in range(3):
        assert not magazine.fetch((9,))
        magazine.tend((0,), (0,))
        now_s += LACKING_S / 2
    assert not magazine.fetch((1,))
    magazine.tend((0,), (0,))
    assert said == [BlocksWanted((9,)), BlocksWanted((1,))]
    magazine.leased(BlocksLeased(pack_ids([1]), pack_ids([1])))
    assert not magazine.fetch((9,)) and magazine.fetch((1,)) and magazine.allocate((1,)) == [[1]]
    assert not magazine.fetch((9,))
    magazine.tend((0,), (0,))
    assert said.pop() == BlocksWanted((9,)), "and then the prompt's turn has come"
    assert not magazine.fetch((1,))
    for _ in range(4):  # whoever lacked one is gone
        assert not magazine.fetch((9,))
        now_s += LACKING_S / 2
        magazine.tend((0,), (0,))
    assert said[-1] == BlocksWanted((9,))


def test_who_lacks_more_than_a_moment_ago_is_heard_at_once() -> None:
    """As one does with every sequence that was admitted meanwhile, which needs a block to grow."""
    said = list[MemoryMessage]()
    magazine = Magazine(ONE, said.append, clock=lambda: 0.0)
    assert not magazine.fetch((2,))
    magazine.tend((0,), (0,))
    magazine.leased(BlocksLeased(pack_ids([1, 2]), pack_ids([1, 1])))
    assert not magazine.fetch((3,))
    magazine.tend((0,), (0,))
    assert said == [BlocksWanted((2,)), BlocksWanted((1,))]


def test_prompts_that_want_little_pass_one_that_wants_much_but_not_for_ever() -> None:
    rig = Rig()
    for client in (2, 3):
        rig.pools.want(User(client, (f"w{client}", 1), False), LAYOUT, (NUM_BLOCKS,))
    held = rig.lease(3, 4)
    rig.pools.want_blocks(0, (10,))
    passing = [rig.lease(2, 2), rig.lease(2, 2)]
    assert rig.pools.want_blocks(2, (2,)) == [], "6 are more than half of 10"
    assert rig.pools.usage().num_free == 4
    assert rig.pools.want_blocks(2, (1,))[0].client == 2, "5 are not"
    for blocks in passing:
        assert rig.free(2, blocks) == []
    [answer] = rig.free(3, held)[:1]
    assert answer.client == 0 and isinstance(answer.message, BlocksLeased)
    assert rig.pools.usage().num_free == 1 and not rig.pools.pools[LAYOUT].passed


def test_nobody_passes_what_is_wanted_to_go_on_decoding() -> None:
    rig = Rig()
    rig.lease(0, 8)
    rig.pools.want_blocks(1, (6,))
    assert rig.pools.want_blocks(0, (1,)) == []


def test_generations_go_round() -> None:
    index = BlockIndex(PoolShape(LAYOUT, (2,)))
    index.generation[1] = (1 << 31) - 1
    assert index.lease(0, (1,)) == [1] and index.generation[1] == 1
    assert index.claims == [FREE, (BlockState.LEASED, 0)]
    index.offer(0, OfferKey(1, "r", 0), [1], [1])
    index.accept(OfferKey(1, "r", 0))
    assert index.claims == [FREE, (BlockState.LEASED, 1)]


def test_what_is_lacking_is_kept_a_moment_and_a_shortage_is_told_from_a_late_answer() -> None:
    now_s, said = 0.0, list[MemoryMessage]()
    magazine = Magazine(ONE, said.append, clock=lambda: now_s)
    magazine.tend((1,), (0,))
    assert said.pop() == BlocksWanted((2,))
    magazine.leased(BlocksLeased(pack_ids([1, 2]), pack_ids([1, 1])))
    assert not magazine.fetch((5,))
    magazine.tend((1,), (0,))
    assert said.pop() == BlocksWanted((3,))
    now_s = 5 * PATIENCE_S
    assert not magazine.is_exhausted(), "the server has not answered yet"
    magazine.shortage(is_short=True)
    magazine.tend((1,), (0,))
    assert said == [BlocksWanted((5,)), BlocksFreed(pack_ids([2, 1]), pack_ids([1, 1]))], (
        "nobody waits for what it holds"
    )
    assert not magazine.is_exhausted()
    now_s += 2 * PATIENCE_S
    assert magazine.is_exhausted()
    said.clear()
    magazine.leased(BlocksLeased(pack_ids(range(1, 6)), pack_ids([2] * 5)))
    magazine.tend((1,), (0,))
    assert said == [] and magazine.has((5,)), "it came, and is kept for who lacked it"
    now_s += 2 * LACKING_S
    magazine.tend((1,), (0,))
    assert [type(message) for message in said] == [BlocksFreed] and magazine.num_free == (0,)
