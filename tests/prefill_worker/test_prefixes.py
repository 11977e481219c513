"""Prompts that begin alike, with the memory server's own index and no process, device or clock."""

from collections.abc import Iterable
from typing import cast

from common.memory.blocks.answers import Answer
from common.memory.blocks.pool import User
from common.memory.client.lease_cache import LeaseCache
from common.memory.server.pools import Pools
from common.memory.server.report import usage
from common.serving.prompts.prefixes import PromptPrefixes
from common.settings.config import PrefillSection
from common.settings.memory_sections import KVSection
from common.wire.messages.memory import (
    BlocksFreed,
    BlocksLeased,
    BlocksWanted,
    MemoryMessage,
    OfBlocks,
    PoolShortage,
    PromptBlocks,
)
from common.wire.values.packing import pack_ids, unpack_ids
from common.wire.values.pool_shape import PoolShape
from prefill_worker.sequence import PrefillSequence
from tests.memory.parties import Bytes
from tests.memory.tiers import slow_tier
from tests.support.allocator import check_owned
from tests.support.layouts import no_prefixes, tiny
from tests.support.sequences import blocks_of_prompts, is_ending, prompt_scheduler, prompt_sequence, taken
from tests.support.slow_rate import SlowRate

BLOCK = 4
US, DECODER = 1, 2


class House:
    """A prefill worker's scheduler and the pools of its memory server; `decoded` are blocks that others have."""

    def __init__(self, num_blocks: int = 200, num_at_hand: int = 50) -> None:
        self.now_s, self.num_at_hand = 0.0, num_at_hand
        shape = PoolShape(tiny(BLOCK), (num_blocks + 1,))
        self.tier, self.copies = slow_tier(shape.layout.groups[0].block_bytes, 300, 100, 64)
        self.pools = Pools(Bytes, 0.0, poisons=False, tier=self.tier)
        for client, is_decoding in ((US, False), (DECODER, True)):
            self.pools.want(User(client, (f"w{client}", 1), is_decoding), shape.layout, shape.num_blocks)
        self.said: list[MemoryMessage] = []
        self.num_added = 10
        self.told: dict[str, int] = {}
        self.leases = LeaseCache(shape, self.said.append, clock=lambda: self.now_s)
        section = KVSection(prefix_min_tokens=0)
        self.prefixes = PromptPrefixes(self.leases, self._tell, section, rate=SlowRate())
        limits = PrefillSection(max_batch_tokens=8 * BLOCK).on("cuda")
        self.scheduler = prompt_scheduler(limits, self.leases, 1000, self.prefixes)
        self.computed: list[tuple[str, int]] = []

    def _tell(self, sequence: PrefillSequence) -> None:
        self.told[sequence.request.request_id] = sequence.num_scheduled_tokens

    def add(
        self,
        name: str,
        token_ids: Iterable[int],
        *,
        salt: bytes = b"",
        priority: int = 0,
        turn: int = 0,
        num_logprobs: int = 0,
        holder: tuple[str, int] | None = None,
    ) -> PrefillSequence:
        worker_id, epoch = holder or ("", 0)
        sequence = prompt_sequence(
            name, token_ids, salt=salt, priority=priority, turn=turn or self.num_added,
            num_prompt_logprobs=num_logprobs, holder_worker_id=worker_id, holder_epoch=epoch,
        )  # fmt: skip
        self.num_added += 1
        self.scheduler.add(sequence)
        return sequence

    def exchange(self) -> None:
        """What was said is heard, and answered."""
        self.leases.update((self.num_at_hand,), (0,))
        while self.said:
            self.hear(self.pools.handle(US, cast(OfBlocks, self.said.pop(0))))

    def hear(self, answers: list[Answer]) -> None:
        for client, message, _ in answers:
            match message:
                case PromptBlocks() if client == US:
                    self.prefixes.receive(message)
                case BlocksLeased() if client == US:
                    self.leases.receive(message)
                case PoolShortage() if client == US:
                    self.leases.demand.shortage(is_short=message.is_short)

    def step(self) -> list[tuple[str, int]]:
        """One step, which is over at once; complete prompts are let go."""
        chunks = []
        for _ in range(3):  # blocks that are lacking come
            self.exchange()
            if chunks := self.scheduler.schedule():
                break
        pieces = [(chunk.sequence.request.request_id, chunk.num_tokens) for chunk in chunks]
        self.scheduler.launched(chunks)
        sequences = [chunk.sequence for chunk in chunks]
        self.scheduler.collected(sequences)
        self.prefixes.computed([(each, each.num_scheduled_tokens) for each in sequences], self.scheduler.waiting)
        for sequence in sequences:
            if is_ending(self.scheduler, sequence):
                assert sequence.beginning.num_sealed == len(sequence.token_ids) // BLOCK
                self.leases.free(taken(self.scheduler, sequence))
        self.computed += pieces
        self.exchange()
        self.check()
        return pieces

    def check(self) -> None:
        check_owned(self.leases, [*blocks_of_prompts(self.scheduler), *self.filled()])
        running = {digest for s in self.scheduler.prompts.values() if s.is_started for digest in s.beginning.digests}
        assert self.prefixes.computing.keys() <= running

    def filled(self) -> Iterable[list[int]]:
        """Blocks that are filled from elsewhere."""
        return ()

    def all_done(self) -> None:
        while self.scheduler.prompts:
            assert self.step(), "somebody waits for ever"
        self.check()
        assert not self.prefixes.grants.asked and not self.prefixes.computing and not len(self.leases.references)

    def take_away(self, num_blocks: int) -> tuple[list[int], list[int]]:
        """Others lease so many."""
        [(_, leased, _)] = [a for a in self.pools.handle(DECODER, BlocksWanted((num_blocks,))) if a.client == DECODER]
        assert isinstance(leased, BlocksLeased)
        return unpack_ids(leased.block_ids), unpack_ids(leased.generations)

    def give_back(self, block_ids: list[int], generations: list[int]) -> None:
        self.hear(self.pools.handle(DECODER, BlocksFreed(pack_ids(block_ids), pack_ids(generations))))


def test_what_is_found_is_not_computed_but_one_token_always_is() -> None:
    house, text = House(), list(range(16))
    house.add("first", text)
    assert house.step() == [("first", 16)]
    for name, ids, num_found in (("same", text, 12), ("longer", [*text, 1, 2], 16), ("other", [*text[:9], 99], 8)):
        house.add(name, ids)
        assert house.step() == [(name, len(ids) - num_found)]
        assert house.told[name] == num_found
    house.add("salted", text, salt=b"x")
    assert house.step() == [("salted", 16)] and "salted" not in house.told
    house.all_done()


def test_equal_prompts_wait_for_the_first_and_begin_behind_what_it_has_sealed() -> None:
    house, text = House(), list(range(50))
    for name in "abc":
        house.add(name, text)
    house.add("stranger", [99] * 5)
    assert house.step() == [("stranger", 5), ("a", 27)]
    assert house.step() == [("a", 23)], "b and c wait for what it computes"
    assert house.step() == [("b", 2), ("c", 2)]
    house.all_done()


def test_an_answer_that_was_on_its_way_while_blocks_were_sealed_is_asked_for_again() -> None:
    house, text = House(), list(range(50))
    first = house.add("first", text)
    house.exchange()
    for _ in range(2):
        chunks = house.scheduler.schedule()
        house.scheduler.launched(chunks)
    house.add("second", text)
    answers = [answer for message in house.said for answer in house.pools.handle(US, cast(OfBlocks, message))]
    house.said.clear()
    house.scheduler.collected([first, first])
    house.prefixes.computed([(first, 50)], house.scheduler.waiting)
    house.hear(answers)
    house.leases.free(taken(house.scheduler, first))
    assert house.step() == [("second", 2)]
    house.all_done()


def test_those_that_wait_are_looked_at_once_a_step() -> None:
    house = House()
    step = [house.add(name, range(base, base + 8)) for base, name in ((0, "a"), (100, "b"), (200, "c"))]
    house.exchange()
    house.scheduler.launched(house.scheduler.schedule())
    alike = [house.add(f"{first.request.request_id} too", [*first.token_ids, 1]) for first in step]
    house.exchange()
    house.scheduler.collected(step)
    house.prefixes.computed([(each, 8) for each in step], iter(house.scheduler.waiting))
    assert house.prefixes.grants.asked.keys() == {each.key for each in alike}
    for each in step:
        house.leases.free(taken(house.scheduler, each))
    house.all_done()


def test_a_prompt_goes_its_own_way_where_the_other_ends() -> None:
    house = House()
    house.add("a", range(80))
    house.add("b", [*range(40), *range(200, 210)])
    assert house.step() == [("a", 32)]
    assert house.step() == [("a", 32)], "the next block is in this step"
    assert ("b", 10) in house.step()
    house.all_done()


def test_nobody_waits_for_one_that_is_less_urgent_or_gone() -> None:
    house = House()
    house.add("late", range(60), priority=5)
    assert house.step() == [("late", 32)]
    house.add("urgent", range(60))
    assert house.step() == [("urgent", 28), ("late", 4)], "it finds what is sealed, and computes the rest itself"
    house.all_done()
    house.add("gone", range(100, 160))
    assert house.step() == [("gone", 32)]
    house.add("next", range(100, 160))
    house.exchange()
    assert house.scheduler.schedule() == [] or house.prefixes.computing
    assert house.scheduler.remove("gone", 0)
    house.all_done()
    assert sum(count for name, count in house.computed if name == "next") == 60 - 32


def test_nobody_waits_for_one_whose_turn_comes_later_but_for_its_last_step() -> None:
    house = House()
    house.add("later", range(60), turn=5)
    assert house.step() == [("later", 32)]
    house.add("first", range(60), turn=1)
    assert house.step() == [("first", 28), ("later", 4)]
    house.all_done()
    house.add("later", range(100, 120), turn=9)
    house.exchange()
    chunks = house.scheduler.schedule()
    house.scheduler.launched(chunks)
    house.add("first", range(100, 120), turn=8)
    house.exchange()
    assert house.scheduler.schedule() == [], "what it begins with is launched"


def test_what_is_given_up_lets_go_of_what_was_found_and_of_what_is_still_to_come() -> None:
    house, text = House(), list(range(20))
    house.add("first", text)
    house.step()
    house.add("asked", text)
    house.scheduler.remove("asked", 0)
    house.add("found", text)
    house.exchange()
    assert house.told["found"] == 16 and len(house.leases.references) == 4
    house.scheduler.remove("found", 0)
    house.exchange()
    house.check()
    house.all_done()


def test_prompts_whose_own_tokens_are_scored_are_computed_and_help_others() -> None:
    house, text = House(), list(range(20))
    for _ in range(2):
        house.add("scored", text, num_logprobs=1)
        assert house.step() == [("scored", 20)]
    house.add("plain", text)
    assert house.step() == [("plain", 4)]
    for name in ("one", "two"):
        house.add(name, range(100, 110), num_logprobs=1)
    assert house.step() == [("one", 10), ("two", 10)], "neither waits for the other"
    for name in ("a", "b"):
        house.add(name, range(200, 240), num_logprobs=1)
    assert [house.step() for _ in range(3)] == [[("a", 32)], [("a", 8), ("b", 24)], [("b", 16)]], (
        "nor uses what it seals"
    )
    house.all_done()


def test_those_that_wait_for_blocks_hold_none_so_that_they_never_wait_for_one_another() -> None:
    house = House(num_blocks=20, num_at_hand=0)
    for base in (0, 1000):
        house.add(f"short {base}", range(base, base + 8 * BLOCK - 1))
        house.step()
    taken = house.take_away(4)  # 16 are left, 14 of which are found by two that want 13 each
    for base in (0, 1000):
        house.add(f"long {base}", range(base, base + 12 * BLOCK))
    house.exchange()
    assert house.told == {"long 0": 7 * BLOCK} and len(house.leases.references) == 7, "the other holds nothing"
    house.all_done()
    assert sum(count for name, count in house.computed if name == "long 0") == 5 * BLOCK
    house.give_back(*taken)


def test_a_prompt_that_waits_gets_all_its_blocks_at_once_and_what_is_there_by_then() -> None:
    house, text = House(num_blocks=20, num_at_hand=0), list(range(12 * BLOCK))
    house.add("first", text[: 8 * BLOCK])
    house.step()
    taken = house.take_away(10)
    house.add("long", text)
    assert house.step() == [] and not house.leases.in_use and not len(house.leases.references)
    house.give_back(*taken)
    house.all_done()
    assert house.computed == [("first", 8 * BLOCK), ("long", 4 * BLOCK)]


def test_a_grant_that_crosses_the_end_of_its_prompt_is_given_back() -> None:
    house = House(num_blocks=20, num_at_hand=0)
    house.add("gone", range(30))
    answers = [answer for message in house.said for answer in house.pools.handle(US, cast(OfBlocks, message))]
    house.said.clear()
    house.scheduler.remove("gone", 0)
    house.hear(answers)
    house.exchange()
    assert not house.prefixes.grants.asked and not house.leases.in_use and usage(house.pools).num_free == 20


def test_a_prompt_that_is_given_up_while_it_waits_keeps_no_other_waiting() -> None:
    house = House(num_blocks=20, num_at_hand=0)
    taken = house.take_away(10)
    house.add("large", range(60))
    house.add("small", range(100, 132))
    assert house.step() == []
    house.scheduler.remove("large", 0)
    assert house.step() == [("small", 32)]
    house.give_back(*taken)
    house.all_done()


def test_better_priority_gets_its_blocks_first() -> None:
    house = House(num_blocks=20, num_at_hand=0)
    taken = house.take_away(10)
    for name, priority in (("late", 5), ("later", 5), ("urgent", 0)):
        house.add(name, range(1000 * len(name), 1000 * len(name) + 60), priority=priority)
    assert house.step() == []
    house.give_back(*taken)
    house.all_done()
    assert [name for name, _ in house.computed] == ["urgent", "urgent", "late", "late", "later", "later"]


def copy(house: House) -> None:
    """All that is to be copied, to host memory and back."""
    house.hear(house.pools.update())
    while house.copies.begun:
        house.copies.end()
        house.hear(house.pools.update())


def test_what_is_in_host_memory_comes_back_when_there_is_room_for_all_of_the_prompt() -> None:
    """As of a sequence that had to make room: it takes no more blocks than to compute it would."""
    house = House(num_blocks=60, num_at_hand=0)
    text = list(range(50 * BLOCK))
    house.add("first", text[: 40 * BLOCK])
    house.all_done()
    copy(house)
    block_ids, generations = house.take_away(60)
    house.give_back(block_ids[:20], generations[:20])
    house.add("second", text)
    house.step()
    assert not house.told and not house.copies.begun, "too few are free for that"
    house.give_back(block_ids[20:51], generations[20:51])
    house.exchange()
    assert not house.leases.in_use, "nothing is leased ahead of what is restored"
    copy(house)
    assert house.told["second"] == 40 * BLOCK and house.tier.traffic.num_restored == 40
    house.computed.clear()
    house.all_done()
    assert house.computed == [("second", 8 * BLOCK), ("second", 2 * BLOCK)]


def test_short_prompts_are_not_looked_up_but_equal_ones_together_are_computed_once() -> None:
    house, text = House(), list(range(20))
    house.prefixes.min_tokens = 21
    for _ in range(2):
        house.add("alone", text)
        assert house.step() == [("alone", 20)]
    for name in ("a", "b"):
        house.add(name, range(100, 120))
    assert (house.step(), house.step()) == ([("a", 20)], [("b", 4)])
    house.add("longer", [*text, 1])
    assert house.step() == [("longer", 1)]
    house.all_done()


def test_what_was_granted_and_given_back_is_asked_for_again() -> None:
    house, text = House(), list(range(50))
    house.add("whole", text)
    assert [house.step(), house.step()] == [[("whole", 32)], [("whole", 18)]]
    second = house.add("second", text)
    house.exchange()
    assert (
        second.num_scheduled_tokens == 48
        and house.prefixes.grants.release([second])
        and not house.prefixes.grants.release([second])
    )
    assert second.num_scheduled_tokens == 0 and not blocks_of_prompts(house.scheduler)[0]
    assert house.step() == [("second", 2)]
    house.all_done()


def test_a_chain_goes_on_from_the_last_full_block() -> None:
    house = House()
    short, long = house.add("short", [1, 2]).beginning, house.add("long", range(9)).beginning
    assert short.last_digest == short.root and long.last_digest == long.digests[1]
    off = no_prefixes(house.leases)
    plain = prompt_sequence("plain", [1, 2, 3, 4])
    off.begin(plain)
    assert plain.beginning.last_digest == b"" and not plain.beginning.digests


def test_a_prompt_without_blocks_waits_for_these_and_not_for_the_device() -> None:
    house = House(num_blocks=20, num_at_hand=4)
    first = house.add("first", range(60))
    assert house.scheduler.in_turn == [], "its blocks are asked for"
    house.exchange()
    house.step()
    alike, _ = house.add("alike", range(60)), house.add("other", range(100, 140))
    house.exchange()
    assert house.scheduler.in_turn == [first], "there are five blocks"
    house.step()
    house.exchange()
    assert house.scheduler.in_turn == [alike], "it has the blocks of the first, and the other waits"
    house.all_done()


def test_a_prompt_that_waits_for_what_another_computes_waits_for_the_device() -> None:
    house = House()
    first = house.add("first", range(60))
    house.exchange()
    assert house.scheduler.schedule() != []
    alike = house.add("alike", range(60))
    assert house.prefixes.is_held_up(alike)
    assert house.scheduler.in_turn == [first, alike]
    house.all_done()
