"""What a prefill worker takes from a decode worker's pool: found, pulled, sealed; and it waits for nothing of it."""

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import pytest

from common.base.errors import TransferFailed
from common.kv.pool import KVPool
from common.memory.blocks.pool import User
from common.memory.client.lease_cache import LeaseCache
from common.memory.client.peer_pool_client import PeerMessage, PeerPoolClient
from common.memory.server.pools import Pools
from common.memory.server.report import usage
from common.serving.prompts.rate import PromptRate
from common.serving.worker.peer_servers import PeerServer, PeerServers
from common.wire.messages.memory import BlocksFreed, BlocksLeased, MemoryMessage, OfBlocks, PromptBlocks, PromptWanted
from common.wire.values.block_key import digests, pack_keys, root_of
from common.wire.values.packing import pack_ids
from common.wire.values.pool_shape import PoolShape
from prefill_worker.reply_pools import ReplyPool, ReplyPools
from prefill_worker.retrievals import MAX_AT_ONCE, WAIT_S, Retrievals, Worth
from tests.decode_worker.bench import FakePool
from tests.memory.parties import Bytes
from tests.prefill_worker.test_any_prompts import TEXTS, World, most_prompts
from tests.prefill_worker.test_prefixes import BLOCK, House
from tests.support.layouts import tiny
from tests.support.marks import first_then
from tests.support.messages import pool_export
from tests.support.slow_rate import SlowRate

OWNER, PEER = 1, 2
D = ("d", 1)
TEXT = list(range(60))


class Theirs:
    """A decode worker's pool and its memory server, at which we are a peer; messages there take their time."""

    def __init__(self, num_blocks: int = 60) -> None:
        shape = PoolShape(tiny(BLOCK), (num_blocks + 1,))
        self.pools = Pools(Bytes, 0.0, poisons=False)
        [region, *_] = self.pools.want(User(OWNER, D, is_decoding=True), shape.layout, shape.num_blocks)
        self.pools.visit(User(PEER, ("p", 1), is_peer=True), cast(Any, region.message).pool_id)
        self.outbox: list[MemoryMessage] = []
        self.leases = LeaseCache(shape, self.outbox.append)
        self.pool, self.problem = FakePool(), ""
        self.said: deque[MemoryMessage] = deque()  # by the peer
        self.heard: deque[PeerMessage] = deque()
        self.num_asked = 0
        self.server = PeerServer(cast(PeerPoolClient, self), self.pool, num_workers=1)

    def decode(self, token_ids: Sequence[int], salt: bytes = b"") -> None:
        """A text, which is over: its full blocks can be found."""
        made = digests(root_of(tiny(BLOCK), salt), pack_ids(token_ids), BLOCK)
        self._exchange(len(made))
        [block_ids] = self.leases.allocate((len(made),))
        self.pool.memory.update(zip(block_ids, made, strict=True))
        self.leases.seal(block_ids, made)
        self.leases.free(block_ids)
        self._exchange(0)

    def forget(self, num_blocks: int) -> None:
        """Other texts want so many blocks, if there are so many."""
        num_free = usage(self.pools).num_free
        self._exchange(min(num_blocks, num_free))
        [block_ids] = self.leases.allocate(self.leases.num_free)
        self.pool.memory.update(dict.fromkeys(block_ids, b"another's"))
        self.leases.free(block_ids)
        self._exchange(0)

    def _exchange(self, count: int) -> None:
        for _ in range(2):
            self.leases.fetch((count,))
            self.leases.update((0,), (0,))
            while self.outbox:
                for answer in self.pools.handle(OWNER, cast(OfBlocks, self.outbox.pop(0))):
                    if isinstance(answer.message, BlocksLeased):
                        self.leases.receive(answer.message)

    @property
    def num_read(self) -> int:
        """Blocks that are kept for us."""
        [pool] = self.pools.pools.values()
        return pool.index.sealed.readers.num_of_client[PEER]

    # --- as the peer's end of the connection ---------------------------------------------------

    def look_up(self, request_id: str, attempt: int, wanted: Sequence[bytes], first: int) -> None:
        assert not self.problem, "nobody is there"
        self.num_asked += 1
        self.said.append(PromptWanted(request_id, attempt, pack_keys(wanted), 0, (0,), 0, first))

    def free(self, said: PeerMessage) -> None:
        if not self.problem:
            self.said.append(BlocksFreed(said.block_ids, said.generations))

    def poll(self) -> None: ...

    def answer(self) -> None:
        """The server hears the next that was said."""
        if self.said:
            answers = self.pools.handle(PEER, cast(OfBlocks, self.said.popleft()))
            self.heard += [cast(PromptBlocks, answer.message) for answer in answers if answer.client == PEER]

    def lose(self) -> None:
        """The connection ends."""
        if not self.problem:
            self.problem = "it closed the connection"
            self.said.clear()
            self.pools.leave(PEER)


class FakePeers:
    """Of one pool, which is not proven again."""

    def __init__(self, theirs: Theirs) -> None:
        self.theirs, self.is_lost = theirs, False

    def receive(self) -> list[tuple[PeerServer, PeerMessage]]:
        heard = [] if self.theirs.problem else [(self.theirs.server, said) for said in self.theirs.heard]
        self.theirs.heard.clear()
        return heard

    def check(self, is_used: Callable[[PeerServer], bool]) -> list[PeerServer]:
        if not self.theirs.problem or self.is_lost:
            return []
        self.is_lost = True
        self.theirs.pool.close()
        return [self.theirs.server]

    def leave(self, server: PeerServer) -> None: ...

    def prove(self, export: object) -> Iterator[None]:
        yield
        raise TransferFailed("nobody is there")


def retrievals_of(house: House, theirs: Theirs, written: dict[int, bytes], worth: Worth) -> Retrievals:
    pools = ReplyPools(cast(PeerServers, FakePeers(theirs)), clock=lambda: house.now_s)
    pools.by_id["d"] = ReplyPool(pool_export("d"), server=theirs.server, gb_per_s=1.0)
    return Retrievals(cast(KVPool, written), pools, house.prefixes, worth, clock=lambda: house.now_s)


class Rig(House):
    """A prefill worker that takes from `theirs` whatever is there; an answer and a copy take as long as a test says."""

    def __init__(self, **options: int) -> None:
        super().__init__(**options)
        self.theirs, self.written = Theirs(), dict[int, bytes]()
        worth = Worth(SlowRate(), tiny(BLOCK))
        self.retrievals = retrievals_of(self, self.theirs, self.written, worth)

    def filled(self) -> Iterable[list[int]]:
        return (each.target_ids for each in [*self.retrievals.under_way, *self.retrievals.late])

    def ask(self, name: str, token_ids: Sequence[int] = TEXT, **options: Any) -> None:
        self.add(name, token_ids, holder=D, **options)
        self.turn()

    def turn(self) -> None:
        self.exchange()
        self.retrievals.advance()
        self.exchange()
        self.check()

    def answered(self) -> None:
        """The decode worker's memory server says what is there."""
        while self.theirs.said:
            self.theirs.answer()
        self.turn()

    def copied(self) -> None:
        """What is on its way arrives."""
        self.theirs.pool.close()
        self.turn()

    def settle(self) -> None:
        """Nothing is left, here or there."""
        self.answered()
        self.copied()
        self.all_done()
        self.answered()
        assert not self.theirs.num_read and not self.leases.in_use and not self.retrievals.is_busy


def test_a_reply_is_taken_where_it_is_and_sealed_here() -> None:
    rig = Rig()
    rig.theirs.decode(TEXT[:50])
    rig.add("turn one", TEXT[:21])
    assert rig.step() == [("turn one", 21)]
    rig.ask("turn two")
    assert rig.step() == [], "it waits for an answer"
    rig.answered()
    assert rig.step() == [] and rig.theirs.num_read == 7, "it waits for the copy"
    rig.copied()
    assert rig.step() == [("turn two", 60 - 48)] and rig.told["turn two"] == 48
    assert [len(copy.pairs) for copy in rig.theirs.pool.copies] == [7] and rig.retrievals.num_pulled == 7
    made = digests(root_of(tiny(BLOCK)), pack_ids(TEXT), BLOCK)
    assert [rig.written[target] for _, target in rig.theirs.pool.copies[0].pairs] == made[5:12]
    rig.ask("again")
    assert rig.step() == [("again", 4)] and rig.theirs.num_asked == 1, "it is here"
    rig.settle()


def test_prompts_that_lack_the_same_wait_for_one_copy() -> None:
    rig = Rig()
    rig.theirs.decode(TEXT[:50])
    for name in "abc":
        rig.ask(name)
    rig.add("stranger", [99] * 5)
    assert rig.step() == [("stranger", 5)]
    rig.answered()
    rig.copied()
    rig.turn()
    assert sorted(rig.step()) == [("a", 12)] and len(rig.theirs.pool.copies) == rig.theirs.num_asked == 1
    assert rig.step() == [("b", 4), ("c", 4)], "and for the rest of the first"
    rig.settle()


def test_what_has_no_holder_is_not_worth_it_or_is_being_computed_waits_for_nothing() -> None:
    rig = Rig()
    rig.theirs.decode(TEXT)
    rig.add("nobody named", TEXT[:30])
    assert rig.step() == [("nobody named", 30)]
    for number, holder in enumerate((("e", 1), ("d", 2))):
        rig.add(f"unknown {number}", range(100 * number + 100, 100 * number + 130), holder=holder)
        assert rig.step() == [(f"unknown {number}", 30)]
    rig.add("first", range(1000, 1060))
    assert rig.step() == [("first", 32)]
    rig.ask("second", range(1000, 1060))
    assert rig.step() == [("first", 28)]
    assert rig.step() == [("second", 4)] and not rig.theirs.num_asked
    rig.settle()


def test_what_is_not_there_is_computed() -> None:
    rig = Rig()
    rig.theirs.decode(TEXT, salt=b"another tenant")
    rig.ask("x")
    rig.answered()
    assert rig.step() == [("x", 32)] and rig.theirs.num_asked == 1
    rig.settle()


def test_too_little_to_pay_is_computed() -> None:
    now_s, rig = 0.0, Rig()
    rate = rig.retrievals.worth.rate = PromptRate(clock=lambda: now_s)
    rate.launched(1000)
    now_s += 0.2
    rate.ended()  # 5,000 tokens a second: those of a block take 0.8 ms, and a retrieval takes 1 beside the copy
    worth = rig.retrievals.worth
    assert [worth.is_worth(count, 1.0) for count in (1, 2, 5)] == [False, True, True]
    for _ in range(20):
        worth.add(5, 1.0, took_s=0.01)
    assert [worth.is_worth(count, 1.0) for count in (5, 12, 13)] == [False, False, True], "it takes 10"
    assert not worth.is_worth(1000, 1e-6), "on a slow way"
    rig.theirs.decode(TEXT[:48])
    rig.ask("x")
    assert rig.theirs.num_asked == 1
    rig.answered()
    assert rig.step() == [("x", 32)] and not rig.theirs.pool.copies, "of 14 blocks that may be there 12 are"
    rig.settle()


def test_a_server_that_does_not_answer_is_waited_for_once() -> None:
    rig = Rig()
    rig.theirs.decode(TEXT)
    rig.ask("late")
    rig.now_s += WAIT_S + 0.01
    rig.turn()
    assert rig.step() == [("late", 32)]
    rig.all_done()
    rig.ask("next", range(100, 150))
    assert rig.step() == [("next", 32)] and rig.theirs.num_asked == 1, "it owes an answer"
    rig.all_done()
    rig.answered()
    rig.ask("after", range(200, 250))
    assert rig.step() == [] and rig.theirs.num_asked == 2
    rig.settle()


@pytest.mark.parametrize("moment", ["asked", "pulling"])
@pytest.mark.parametrize("how", ["lost", "late", "broken"])
def test_what_does_not_arrive_is_computed(moment: str, how: str) -> None:
    rig = Rig()
    rig.theirs.decode(TEXT)
    for name in "ab":
        rig.ask(name)
    if moment == "pulling":
        rig.answered()
    match how:
        case "lost":
            rig.theirs.lose()
        case "late":
            rig.now_s += WAIT_S + 0.01
        case "broken":
            rig.theirs.pool.is_broken = True
            for copy in rig.theirs.pool.copies:
                copy.is_broken = True
    rig.turn()
    rig.answered()
    assert rig.step() == [("a", 32)]
    rig.copied()
    rig.all_done()
    assert not rig.retrievals.num_pulled and "b" in rig.told, "which found what the other has computed"
    rig.settle()


@pytest.mark.parametrize("moment", ["asked", "pulling"])
def test_who_is_given_up_leaves_what_comes_to_those_that_wait_with_it(moment: str) -> None:
    rig = Rig()
    rig.theirs.decode(TEXT)
    for name in ("gone", "waits"):
        rig.ask(name)
    if moment == "pulling":
        rig.answered()
    rig.scheduler.remove("gone", 0)
    rig.answered()
    rig.copied()
    rig.turn()
    assert rig.step() == [("waits", 4)] and len(rig.theirs.pool.copies) == 1
    rig.settle()


def test_nothing_is_pulled_for_nobody() -> None:
    rig = Rig()
    rig.theirs.decode(TEXT)
    rig.ask("gone")
    rig.scheduler.remove("gone", 0)
    rig.answered()
    assert not rig.theirs.pool.copies
    rig.settle()


def test_without_blocks_to_pull_into_it_waits_for_all_of_its_blocks_first() -> None:
    rig = Rig(num_blocks=20, num_at_hand=0)
    rig.theirs.decode(TEXT)
    taken = rig.take_away(10)
    rig.ask("x")
    rig.turn()
    assert not rig.theirs.num_asked and rig.step() == []
    rig.now_s += WAIT_S + 0.01
    rig.give_back(*taken)
    rig.turn()
    assert rig.theirs.said and rig.step() == []
    rig.settle()


def test_an_answer_of_more_than_was_asked_for_is_not_believed() -> None:
    rig = Rig()
    rig.ask("x")
    rig.theirs.said.clear()
    ids = pack_ids(range(1, 30))
    rig.theirs.heard.append(PromptBlocks("x", 0, ids, ids, num_sealed=29, num_places=29, num_alike=29))
    rig.turn()
    assert rig.step() == [("x", 32)] and not rig.theirs.pool.copies
    rig.theirs.said.clear()
    rig.settle()


def test_of_very_many_some_are_computed() -> None:
    rig = Rig(num_blocks=400, num_at_hand=300)
    for number in range(MAX_AT_ONCE + 1):
        rig.ask(f"{number}", range(100 * number, 100 * number + 30))
    assert rig.theirs.num_asked == MAX_AT_ONCE
    assert rig.step() == [(f"{MAX_AT_ONCE}", 30)]
    rig.settle()


class RetrievingWorld(World):
    """Prompts that may be in a decode worker's pool, where texts come and go."""

    def __init__(self) -> None:
        super().__init__()
        self.theirs = Theirs(num_blocks=30)
        worth = Worth(SlowRate(), tiny(BLOCK))
        self.retrievals = retrievals_of(self, self.theirs, self.written, worth)
        self.theirs.decode(TEXTS[0][:40])

    def filled(self) -> Iterable[list[int]]:
        return (each.target_ids for each in [*self.retrievals.under_way, *self.retrievals.late])

    def acts(self, rng: random.Random) -> list[tuple[int, Callable[[], None]]]:
        return [
            *super().acts(rng),
            (12, lambda: self.add_prompt(rng.randrange(len(TEXTS)), rng.randint(1, 55), rng.randrange(2), D)),
            (4, lambda: self.decode(rng.choice(TEXTS)[: rng.randint(4, 55)])),
            (20, self.theirs.answer), (20, self.retrievals.advance), (10, self.theirs.pool.close),
            (2, lambda: self.others_take(24)), (2, self.others_give_back),
            (1, lambda: self.theirs.forget(rng.randint(1, 20))),
            (1, lambda: self.break_copies() if rng.random() < 0.3 else None),
            (1, lambda: self.theirs.lose() if rng.random() < 0.02 else None),
        ]  # fmt: skip

    def decode(self, text: list[int]) -> None:
        if usage(self.theirs.pools).num_free >= len(text) // BLOCK:
            self.theirs.decode(text)

    def break_copies(self) -> None:
        for copy in self.theirs.pool.copies:
            copy.is_broken = True

    def wait(self) -> None:
        self.now_s += WAIT_S

    def go_on(self) -> None:
        self.theirs.answer()
        self.theirs.pool.close()
        self.retrievals.advance()

    def settle(self) -> None:
        super().settle()
        for _ in range(50):
            self.go_on()
            self.say()
        assert not self.theirs.num_read and not self.retrievals.under_way and not self.retrievals.late


@pytest.mark.medium
@pytest.mark.parametrize("seed", first_then(pytest.mark.slow, range(4)))
def test_whatever_happens_nobody_reads_another_text_nor_waits_for_ever(seed: int) -> None:
    num_pulled = num_prompts = 0
    for walk in range(40):
        rng, world = random.Random(f"{seed} {walk}"), RetrievingWorld()
        world.most_prompts = most_prompts(walk)
        for _ in range(160):
            world.act(rng)
        world.settle()
        num_prompts, num_pulled = num_prompts + world.num_prompts, num_pulled + world.retrievals.num_pulled
    assert num_pulled > num_prompts // 20, "hardly anything was taken"
