"""Prompts of another pool of which ours has the beginning, with the memory server's own index and no process."""

import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from common.memory.blocks.answers import Answer
from common.memory.blocks.pool import User
from common.memory.client.lease_cache import LeaseCache
from common.memory.client.shared_pool import SharedPool
from common.memory.server.pools import Pools
from common.memory.server.report import usage
from common.wire.messages.memory import (
    BlocksFreed,
    BlocksLeased,
    BlocksWanted,
    MemoryMessage,
    OfBlocks,
    PoolShortage,
    PromptBlocks,
    PromptWanted,
)
from common.wire.values.block_key import digests, root_of
from common.wire.values.packing import pack_ids, unpack_ids
from common.wire.values.pool_shape import PoolShape
from common.wire.values.sampling_params import SamplingParams
from decode_worker.arrivals.prefixes import Prefixes
from decode_worker.sequences.sealing import Sealing
from decode_worker.sequences.sequence import DecodeSequence
from tests.decode_worker.bench import BLOCK_SIZE, Rig, prompt_of, with_slot
from tests.memory.parties import Bytes
from tests.support.layouts import tiny
from tests.support.messages import kv_offer

US, OTHER = 1, 2
ROOT = root_of(tiny(BLOCK_SIZE), b"a tenant")


def keys_of(token_ids: Sequence[int], root: bytes = ROOT) -> list[bytes]:
    return digests(root, pack_ids(token_ids), BLOCK_SIZE)


class House(Rig):
    """A decode worker's handoffs and the pools of its memory server; a block of memory holds the digest of its text."""

    def __init__(self, num_blocks: int = 100, level: int = 30, max_num_seqs: int = 8) -> None:
        self.now_s, self.level, self.is_mute = 0.0, level, False
        shape = PoolShape(tiny(BLOCK_SIZE), (num_blocks + 1,))
        self.pools = Pools(Bytes, 0.0, poisons=False)
        for client in (US, OTHER):
            self.pools.want(User(client, (f"w{client}", 1), True), shape.layout, shape.num_blocks)
        self.outbox: list[MemoryMessage] = []
        self.leases = LeaseCache(shape, self.outbox.append, clock=lambda: self.now_s)
        super().__init__(max_num_seqs=max_num_seqs, allocator=self.leases)
        shared = SimpleNamespace(leases=self.leases, problem="")
        self.prefixes = self.pulls.prefixes = self.pulls.transfers.prefixes = Prefixes(cast(SharedPool, shared))
        self.sealing = Sealing(self.leases)
        self.num_asked = 0
        self.next_source = 1
        self.exchange()

    def exchange(self) -> None:
        """What was said is heard, and answered unless the server is mute."""
        self.leases.update((self.level,), self.scheduler.capacity.num_growing)
        while self.outbox and not self.is_mute:
            said = self.outbox.pop(0)
            self.num_asked += isinstance(said, PromptWanted)
            self._hear(self.pools.handle(US, cast(OfBlocks, said)))

    def _hear(self, answers: list[Answer]) -> None:
        for client, message, _ in answers:
            match message:
                case PromptBlocks() if client == US:
                    self.hear(message)
                case BlocksLeased() if client == US:
                    self.leases.receive(message)
                case PoolShortage() if client == US:
                    self.leases.demand.shortage(is_short=message.is_short)

    def hear(self, message: PromptBlocks) -> None:
        """What there is of a text."""
        self.pulls.prefixes.receive(message)

    def offer(self, name: str, token_ids: Sequence[int], max_tokens: int = 16, root: bytes = ROOT) -> list[int]:
        """A prompt and its first output, in blocks of `p`; returns those."""
        prompt = token_ids[:-1]
        source_ids = list(range(self.next_source, self.next_source + -(-len(prompt) // BLOCK_SIZE)))
        self.next_source = (self.next_source + len(source_ids)) % 900 + 1
        keys = keys_of(prompt, root or ROOT)
        self.pool.memory.update(zip(source_ids, [*keys, b"not full"], strict=False))
        chain: dict[str, Any] = {"root": root, "digest": keys[-1] if keys and root else root}
        sequence = prompt_of(name, prompt, sampling=SamplingParams(max_tokens=max_tokens))
        self.receive(sequence, kv_offer(name, with_slot(source_ids, len(prompt)), token_id=token_ids[-1], **chain))
        return source_ids

    def turn(self) -> list[DecodeSequence]:
        self.exchange()
        arrived = super().turn()
        for sequence in arrived:
            keys, table = keys_of(sequence.token_ids[:-1]), sequence.tables[0].block_ids
            assert [self.memory[block_id] for block_id in table[: len(keys)]] == keys, "it reads another's text"
        self.exchange()
        return arrived

    def arrive(self) -> list[DecodeSequence]:
        """Pull whatever there is room for."""
        arrived = []
        for _ in range(4):
            arrived += self.turn()
            self.end_copies()
        return arrived

    def decode(self) -> None:
        """A step, as the loop has it."""
        self.exchange()
        self.scheduler.slots.make()
        while self.scheduler.slots.is_starved(self.scheduler.lingering) and not self.pulls.release_blocks():
            self.scheduler.preempt()
        sequences = self.scheduler.launched()
        for sequence in sequences:
            sequence.token_ids.append(len(sequence.token_ids))
            sequence.num_outputs += 1
            place, rest = divmod(len(sequence.token_ids) - 1, BLOCK_SIZE)
            if not rest:
                self.memory[sequence.tables[0].block_ids[place - 1]] = keys_of(sequence.token_ids[:-1])[-1]
            if sequence.num_outputs == sequence.sampling.max_tokens:
                self.scheduler.end(sequence)
        self.sealing.seal(sequences)
        self.scheduler.collected(sequences)

    def converse(self, name: str, token_ids: Sequence[int], num_outputs: int = 10) -> list[int]:
        """A turn of a conversation, which ends; returns all of it."""
        self.offer(name, token_ids, num_outputs)
        [sequence] = self.arrive()
        for _ in range(2 * num_outputs):
            self.decode()
        assert sequence.ended
        self.exchange()
        return [*sequence.token_ids]

    def take_away(self, num_blocks: int) -> BlocksFreed:
        """Others lease so many and write there; returns how they give them back."""
        [leased] = [a.message for a in self.pools.handle(OTHER, BlocksWanted((num_blocks,))) if a.client == OTHER]
        assert isinstance(leased, BlocksLeased)
        self.memory.update(dict.fromkeys(unpack_ids(leased.block_ids), b"another's"))
        return BlocksFreed(leased.block_ids, leased.generations)

    def give_back(self, freed: BlocksFreed) -> None:
        self._hear(self.pools.handle(OTHER, freed))

    def all_let_go(self) -> bool:
        """Nothing is kept here for anyone."""
        self.exchange()
        return not (self.prefixes.asked or len(self.leases.references) or self.leases.in_use)


def test_turn_two_of_a_conversation_pulls_the_new_blocks_alone() -> None:
    house = House()
    text = house.converse("one", range(22))  # 5 full blocks of its prompt, and 2 of its reply
    assert house.copied() == [[1, 2, 3, 4, 5, 6]]
    source_ids = house.offer("two", [*text, *range(500, 509)])
    [sequence] = house.arrive()
    num_there = (len(text) - 1) // BLOCK_SIZE
    assert num_there == 7 and house.copied()[1:] == [source_ids[num_there:]]
    assert (house.prefixes.num_found, house.prefixes.num_pulled) == (7, 6 + len(source_ids) - 7)
    assert sequence.chain.num_blocks == (len(sequence.token_ids) - 1) // BLOCK_SIZE
    house.scheduler.end(sequence)
    assert house.all_let_go() and house.peers["p"].said[-2:] == [("accept", "two"), ("free", "two")]


def test_a_prompt_of_which_all_is_there_pulls_nothing_and_decodes() -> None:
    house = House()
    house.converse("one", range(21))
    house.offer("again", range(21), 30)
    [sequence] = house.arrive()
    assert len(house.copied()) == 1
    for _ in range(20):
        house.decode()
    house.scheduler.end(sequence)
    assert house.all_let_go()


def test_nothing_is_found_of_another_tenant_or_where_nothing_is_sealed() -> None:
    house = House()
    house.converse("one", range(22))
    house.offer("unsealed", range(22), root=b"")
    [unsealed] = house.arrive()
    assert house.num_asked == 1 and not unsealed.chain.digest and not unsealed.chain.num_blocks
    source_ids = house.offer("salted", range(22), root=root_of(tiny(BLOCK_SIZE), b"another"))
    house.exchange()
    house.start()
    assert house.num_asked == 2 and house.copied()[-1] == source_ids


def test_short_prompts_are_sealed_and_not_looked_up() -> None:
    house = House()
    house.prefixes.min_tokens = 22
    text = house.converse("short", range(22))  # and its first output
    assert house.num_asked == 0
    house.offer("long", [*text, 1, 2])
    house.arrive()
    assert (house.num_asked, house.prefixes.num_found) == (1, (len(text) - 1) // BLOCK_SIZE)
    tiny_one = House()
    text = tiny_one.converse("less than a block", [1, 2, 3], 30)
    assert tiny_one.num_asked == 0 and len(text) == 32
    tiny_one.offer("next", [*text, 1, 2])
    tiny_one.arrive()
    assert tiny_one.prefixes.num_found == 7


def test_what_was_pulled_ahead_is_not_looked_up_and_is_sealed() -> None:
    house = House()
    house.pool.memory.update(enumerate(keys_of(range(21)), 1))
    house.progress("a", 21, [1, 2])
    assert house.offer("a", range(22), 2)[:2] == [1, 2]
    [sequence] = house.arrive()
    assert house.num_asked == 0 and house.copied() == [[1, 2], [3, 4, 5, 6]]
    assert sequence.chain.num_blocks == 5
    house.decode()
    house.offer("b", range(22))
    house.arrive()
    assert house.prefixes.num_found == 5


def lose_the_visit(house: House) -> None:
    house.peers["p"].problem = "it closed the connection"
    house.pulls.check()


@pytest.mark.parametrize("is_answered", [False, True])
@pytest.mark.parametrize(
    "give_up",
    [lambda house: house.pulls.abort("x", 0), lose_the_visit, lambda house: house.pulls.drop_all()],
    ids=["abort", "source lost", "draining"],
)
def test_what_waits_and_is_given_up_lets_go_of_what_was_found(
    give_up: Callable[[House], object], is_answered: bool
) -> None:
    house = House(max_num_seqs=1)
    text = house.converse("one", range(22))
    house.offer("first", range(600, 610))
    [first] = house.arrive()  # has the only row
    house.offer("x", text)
    house.is_mute = not is_answered
    house.exchange()
    assert (len(house.leases.references) > 2) is is_answered and bool(house.prefixes.asked) is not is_answered
    give_up(house)
    house.is_mute = False
    house.exchange()
    house.scheduler.end(first)
    assert house.all_let_go() and not house.pulls.waiting


@pytest.mark.parametrize("how", ["abort", "broken", "source lost"])
def test_what_is_pulled_and_given_up_lets_go_of_what_was_found(how: str) -> None:
    house = House()
    text = house.converse("one", range(22))
    house.offer("x", [*text, *range(500, 509)])
    house.turn()
    assert len(house.leases.references) == 7 and house.pulls.transfers.under_way
    match how:
        case "abort":
            house.pulls.abort("x", 0)
        case "broken":
            house.pool.copies[-1].is_broken = True
        case "source lost":
            house.peers["p"].problem = "it closed the connection"
    assert house.arrive() == [] and house.all_let_go()


def test_nobody_waits_for_an_answer_of_a_server_that_is_lost() -> None:
    house = House()
    house.is_mute = True
    house.offer("x", range(22))
    assert house.turn() == [] and not house.copied()
    cast(SimpleNamespace, house.prefixes.shared).problem = "it closed the connection"
    house.turn()
    house.end_copies()
    assert [sequence.request.request_id for sequence in house.turn()] == ["x"] and not house.prefixes.asked


def test_blocks_that_are_found_or_asked_for_are_not_foreseen() -> None:
    house = House(max_num_seqs=1)
    text = house.converse("one", range(22))
    house.pulls.prefixes.latest.clear()
    house.offer("first", range(600, 610))
    house.arrive()
    house.pulls.prefixes.latest.clear()
    house.offer("x", text)
    assert house.foreseen() == (0,)
    house.exchange()
    assert house.prefixes.granted and house.foreseen() == (0,)


def test_those_that_wait_for_blocks_hold_none() -> None:
    house = House(num_blocks=20, level=0)
    texts = [house.converse(f"one {base}", range(base, base + 22), 10) for base in (0, 300)]
    house.exchange()
    taken = house.take_away(6)  # 14 are left, all of them found by two that want 12 each
    for text in texts:
        house.offer(f"two {text[0]}", [*text, *range(500, 514)], 2)
    assert house.turn() == [] and len(house.leases.references) == 7, "the other holds nothing"
    over: list[DecodeSequence] = []
    for _ in range(10):
        over += house.arrive()
        house.decode()
    assert [sequence.ended for sequence in over] == [True, True]
    house.give_back(taken)
    assert house.all_let_go()


def test_what_is_there_is_found_when_there_are_blocks_for_the_rest() -> None:
    house = House(num_blocks=24, level=0)
    text = house.converse("one", range(22))
    taken = house.take_away(16)
    source_ids = house.offer("two", [*text, *range(500, 514)])
    assert house.turn() == [] and not len(house.leases.references), "nothing is kept from others"
    house.give_back(taken)
    assert [sequence.request.request_id for sequence in house.arrive()] == ["two"]
    assert house.copied()[-1] == source_ids[7:]


def test_a_sequence_that_starves_gets_what_those_that_wait_have_found() -> None:
    house = House(num_blocks=14, level=0)
    text = house.converse("one", range(22))
    house.offer("grows", range(600, 626), 30)
    [grows] = house.arrive()
    assert len(grows.tables[0].block_ids) == 7
    house.offer("waits", [*text, *range(500, 514)], 4)
    for _ in range(8):
        house.turn()
        house.now_s += 0.2
        house.decode()
        if not len(house.leases.references) > 7:
            break
    for _ in range(12):
        house.turn()
        house.decode()
    assert not grows.ended and len(grows.token_ids) > 36


@pytest.mark.parametrize("seed", range(8))
def test_whatever_comes_goes_and_is_evicted_each_reads_its_own_text(seed: int) -> None:
    rng, house = random.Random(seed), House(num_blocks=40, level=4)
    texts, taken = [list(range(base, base + 9)) for base in (0, 200, 400, 600)], list[BlocksFreed]()
    seen: list[DecodeSequence] = []
    for number in range(150):
        if rng.random() < 0.5:
            text = rng.choice(texts)[: rng.randint(5, 60)] + rng.choices(range(3), k=rng.randint(1, 9))
            house.offer(f"r{number}", text, rng.randint(2, 12))
        for handoffs in (house.pulls.waiting, house.pulls.transfers.under_way):
            if rng.random() < 0.1 and handoffs:
                house.pulls.abort(rng.choice([*handoffs]).sequence.request.request_id, 0)
        if rng.random() < 0.1 and not taken and usage(house.pools).num_free > 20:
            taken.append(house.take_away(15))
        elif rng.random() < 0.2 and taken:
            house.give_back(taken.pop())
        house.is_mute = rng.random() < 0.2
        seen += house.turn()
        if rng.random() < 0.7:
            house.end_copies()
        house.decode()
        over = [[*sequence.token_ids] for sequence in seen if sequence.ended]
        texts = [text for text in [*texts[:4], *over[-8:]] if len(text) < 70]
        house.now_s += rng.random()
    house.is_mute = False
    for freed in taken:
        house.give_back(freed)
    for _ in range(100):
        house.arrive()
        house.decode()
        house.now_s += 0.3
    assert not house.pulls.waiting and not house.pulls.transfers.under_way and not house.scheduler.active
    assert house.all_let_go() and house.prefixes.num_found and house.prefixes.num_pulled
