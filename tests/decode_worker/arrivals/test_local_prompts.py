"""Prompts that a decode worker computes itself: what is there of them is not computed, and what is, is sealed."""

import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from common.base.errors import ErrorCode
from common.device.steps.loop_trace import Trace
from common.device.steps.prompt_buffers import PromptChunk
from common.device.steps.prompt_runner import PromptRunner
from common.memory.server.report import usage
from common.settings.config import Config, DecodeSection
from common.settings.memory_sections import KVSection
from common.wire.messages.memory import BlocksFreed, PromptBlocks
from common.wire.messages.worker import Message, PromptCached, RequestFailed
from common.wire.transport.router_link import RouterLink
from common.wire.values.output_token import OutputToken
from common.wire.values.sampling_params import SamplingParams
from decode_worker.arrivals.local_prompts import LocalPrompt, LocalPrompts
from decode_worker.sequences.sequence import DecodeSequence
from tests.decode_worker.arrivals.test_prefixes import House, keys_of
from tests.decode_worker.bench import BLOCK_SIZE
from tests.support.allocator import blocks_read
from tests.support.messages import prefill_request
from tests.support.sequences import blocks_of_prompts

SALT = b"a tenant"  # of whom the handoffs are, too
CHUNK_TOKENS = 8


class Chunk:
    """A launched chunk, which is over when the test says so."""

    def __init__(self, house: "LocalHouse", chunk: PromptChunk) -> None:
        self.house, self.chunk = house, chunk

    def ready(self) -> bool:
        return not self.house.is_busy

    def tokens(self) -> list[OutputToken | None]:
        return [OutputToken(5) if self.chunk.is_last else None]

    def scores(self) -> list[None]:
        return [None]


class LocalHouse(House):
    """With prompts that are computed here, chunk by chunk, beside handoffs."""

    def __init__(self, **options: int) -> None:
        self.chunks: list[tuple[int, int]] = []  # where each begins, and its tokens
        self.told: dict[str, int] = {}
        self.is_busy = False
        self.num_named = 0
        super().__init__(**options)
        self.scheduler.capacity.step_tokens = CHUNK_TOKENS
        runner = cast(PromptRunner, SimpleNamespace(launch=self._launch, trace=Trace()))
        config = Config(kv=KVSection(prefix_min_tokens=0), decode=DecodeSection(short_prompt_tokens=CHUNK_TOKENS))
        link = SimpleNamespace(worker=("d", 1), send=self._send)
        self.local = LocalPrompts(runner, self.scheduler, self.leases, config, cast(RouterLink, link))
        self.seen = list[DecodeSequence]()
        self.given_back: list[str] = []

    def hear(self, message: PromptBlocks) -> None:
        if (message.request_id, message.attempt) in self.local.prefixes.grants.asked:
            self.local.prefixes.receive(message)
        else:
            super().hear(message)

    def found(self) -> list[list[int]]:
        if not hasattr(self, "local"):
            return []
        return [*super().found(), *map(list, blocks_of_prompts(self.local.scheduler))]

    def ask(
        self, name: str, token_ids: Sequence[int], max_tokens: int = 16, most_tokens: int = 0, **fields: Any
    ) -> DecodeSequence:
        self.num_named += 1
        sampling, numbers = SamplingParams(max_tokens=max_tokens), {"turn": self.num_named, "most_tokens": most_tokens}
        request = prefill_request(name, token_ids, sampling=sampling, salt=SALT, **numbers, **fields)
        sequence = DecodeSequence.of(request)
        self.local.add(LocalPrompt.of(request, sequence))
        return sequence

    def compute(self) -> bool:
        """What a turn of the loop does with them; whether there is a chunk."""
        self.exchange()
        for sequence, token in self.local.collect():
            sequence.token_ids.append(token.token_id)
            sequence.num_outputs += 1
            self.sealing.seal([sequence])
            self.seen.append(sequence)
            if sequence.num_outputs == sequence.sampling.max_tokens:
                self.scheduler.end(sequence)
        if chunks := self.local.schedule():
            self.local.steps.launch(chunks)
        self.exchange()
        self.check()
        return bool(chunks)

    def _send(self, message: Message) -> None:
        match message:
            case PromptCached():
                self.told[message.request_id] = message.num_tokens
            case RequestFailed():
                assert message.code is ErrorCode.NOT_HERE
                self.given_back.append(message.request_id)

    def run(self) -> None:
        """Compute all that there is room for."""
        for _ in range(3):  # blocks that are lacking come
            while self.compute():
                pass

    def _launch(self, chunks: list[PromptChunk], *, whole_gpu: bool) -> Chunk:
        """It reads what is before the chunk."""
        [chunk] = chunks
        begin, end, [table] = chunk.start, chunk.start + len(chunk.token_ids), chunk.tables
        keys = keys_of(chunk.sequence_ids)
        written = [self.memory[block_id] for block_id in table[: begin // BLOCK_SIZE]]
        assert written == keys[: begin // BLOCK_SIZE], "it reads another's text"
        for number in range(begin // BLOCK_SIZE, -(-end // BLOCK_SIZE)):
            assert table[number] not in blocks_read(self.leases), "it writes what others read"
            self.memory[table[number]] = keys[number] if (number + 1) * BLOCK_SIZE <= end else b"of a part"
        self.chunks.append((begin, end - begin))
        return Chunk(self, chunk)

    def take_chunks(self) -> list[tuple[int, int]]:
        taken, self.chunks = self.chunks, []
        return taken

    def finish(self, *sequences: DecodeSequence) -> None:
        for sequence in sequences:
            for _ in range(40):
                self.decode()
            assert sequence.ended

    def all_let_go(self) -> bool:
        return super().all_let_go() and not len(self.local) and not self.local.prefixes.computing


def test_a_conversation_is_computed_once() -> None:
    house = LocalHouse()
    first = house.ask("one", range(22), 10)
    house.run()
    assert house.take_chunks() == [(0, 8), (8, 8), (16, 6)] and not house.told
    house.finish(first)
    text = [*first.token_ids, *range(500, 505)]
    second = house.ask("two", text)
    house.run()
    num_there = (len(first.token_ids) - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert house.told == {"two": num_there}
    assert house.take_chunks() == [(28, 8), (36, 1)]
    house.finish(second)
    exact = house.ask("again", text[:24])
    house.run()
    assert house.take_chunks() == [(20, 4)], "at least one token is computed"
    house.finish(exact)
    assert house.all_let_go()


def test_handoffs_and_prompts_that_are_computed_here_find_one_another() -> None:
    house = LocalHouse()
    local = house.ask("local", range(22), 4)
    house.run()
    house.finish(local)
    pulled = house.converse("pulled", [*range(22), *range(300, 313)])
    assert house.prefixes.num_found == 5
    house.take_chunks()
    next_one = house.ask("next", [*pulled, 1])
    house.run()
    assert len(pulled) == 44 and house.take_chunks() == [(40, 5)]
    house.finish(next_one)
    assert house.all_let_go()


def test_equal_prompts_that_come_together_are_computed_once() -> None:
    house = LocalHouse()
    asked = [house.ask(name, range(22), 2) for name in "abc"]
    house.run()
    assert house.take_chunks() == [(0, 8), (8, 8), (16, 6), (20, 2), (20, 2)]
    house.finish(*asked)
    assert house.all_let_go()


def test_prompts_whose_own_tokens_are_scored_are_computed_and_sealed() -> None:
    house = LocalHouse()
    for name in ("one", "two"):
        scored = house.ask(name, range(10), 1, num_prompt_logprobs=1)
        house.run()
        assert scored.ended and house.take_chunks() == [(0, 8), (8, 2)]
    plain = house.ask("plain", range(10), 1)
    house.run()
    assert plain.ended and house.take_chunks() == [(8, 2)]
    assert house.all_let_go()


def test_a_short_prompt_of_which_less_is_there_than_was_thought_is_given_back() -> None:
    house = LocalHouse()
    first = house.ask("first", range(22), 10)
    house.run()
    house.finish(first)
    text = [*first.token_ids]
    fits = house.ask("fits", [*text, 1], 1, most_tokens=CHUNK_TOKENS)
    house.run()
    assert fits.ended and not house.given_back
    house.ask("lacks much", [*text, *range(600, 620)], 1, most_tokens=CHUNK_TOKENS)
    house.ask("is too long", range(300, 310), 1, most_tokens=CHUNK_TOKENS)
    exact = house.ask("is short", range(400, 400 + CHUNK_TOKENS), 1, most_tokens=CHUNK_TOKENS)
    house.run()
    assert sorted(house.given_back) == ["is too long", "lacks much"] and exact.ended
    assert house.all_let_go()


def test_a_short_prompt_waits_for_who_computes_what_it_begins_with_and_is_not_given_back() -> None:
    house = LocalHouse()
    long, house.is_busy = house.ask("long", range(22), 1), True
    house.compute()
    short = house.ask("short", range(22), 1, most_tokens=CHUNK_TOKENS)
    house.compute()
    house.is_busy = False
    house.run()
    assert long.ended and short.ended and not house.given_back
    assert house.all_let_go()


def test_what_a_short_prompt_takes_is_told_by_those_that_are_short() -> None:
    house = LocalHouse()
    house.local.add_time(CHUNK_TOKENS + 1, 9.0)
    assert house.local.short_s == 0.0
    house.local.add_time(CHUNK_TOKENS, 0.01)
    house.local.add_time(1, 0.02)
    assert house.local.short_s == pytest.approx(0.012)


@pytest.mark.parametrize("moment", ["asked", "found", "computing"])
def test_what_is_given_up_leaves_nothing_and_holds_nobody_up(moment: str) -> None:
    house = LocalHouse()
    first = house.ask("first", range(12), 1)
    house.run()
    assert first.ended
    house.is_busy = moment == "computing"
    house.is_mute = moment == "asked"
    house.ask("gone", [*range(12), *range(300, 320)])
    house.exchange()
    if moment == "computing":
        assert house.compute() and house.local.prefixes.computing
    waits = house.ask("waits", [*range(12), *range(300, 320)], 1)
    house.exchange()
    house.local.abort("gone", 0)
    house.is_busy = house.is_mute = False
    house.run()
    assert waits.ended and house.all_let_go()


def test_those_that_wait_for_blocks_hold_none() -> None:
    house = LocalHouse(num_blocks=20, level=0)
    texts = [list(range(base, base + 32)) for base in (0, 300)]
    for text in texts:
        house.ask(f"short {text[0]}", text, 1)
        house.run()
    taken = house.take_away(4)  # 16 are left, all of them found by two that want 12 each
    asked = [house.ask(f"long {text[0]}", [*text, *range(900, 914)], 1) for text in texts]
    house.run()
    assert all(sequence.ended for sequence in asked)
    house.give_back(taken)
    assert house.all_let_go()


def test_a_sequence_that_starves_gets_what_prompts_that_wait_have_found() -> None:
    house = LocalHouse(num_blocks=20, level=0, max_num_seqs=1)
    house.ask("first", range(24), 1)
    house.run()
    grows = house.ask("grows", range(600, 626), 30)
    house.run()
    house.ask("waits", [*range(24), *range(500, 520)], 4)
    house.exchange()
    assert len(house.leases.references) == 6 + 6, "of both"
    for _ in range(40):
        house.now_s += 0.2
        house.compute()
        house.scheduler.slots.make()
        if house.scheduler.slots.is_starved(house.scheduler.lingering):
            house.local.prefixes.grants.release(house.local.scheduler.waiting)
        house.decode()
        if grows.ended:
            break
    assert grows.ended and len(grows.token_ids) == 56, "it was not ended for want of blocks"


def act(house: LocalHouse, rng: random.Random, number: int, texts: list[list[int]], taken: list[BlocksFreed]) -> None:
    """Something that may happen now."""
    text = rng.choice(texts)[: rng.randint(5, 60)] + rng.choices(range(3), k=rng.randint(1, 9))
    acts: list[Callable[[], object]] = [
        lambda: house.ask(f"r{number}", text, rng.randint(1, 12), rng.choice([0, 0, CHUNK_TOKENS])),
        lambda: house.offer(f"r{number}", text, rng.randint(2, 12)),
        house.compute,
        house.decode,
        house.end_copies,
        lambda: house.local.abort(f"r{rng.randrange(number + 1)}", 0),
        lambda: taken.append(house.take_away(15)) if not taken and usage(house.pools).num_free > 20 else None,
        lambda: house.give_back(taken.pop()) if taken else None,
    ]
    rng.choices(acts, weights=(3, 3, 9, 6, 4, 1, 1, 2))[0]()


@pytest.mark.parametrize("seed", range(8))
def test_whatever_comes_goes_and_is_evicted_each_reads_its_own_text(seed: int) -> None:
    rng, house = random.Random(seed), LocalHouse(num_blocks=40, level=4)
    texts, taken = [list(range(base, base + 9)) for base in (0, 200, 400, 600)], list[BlocksFreed]()
    for number in range(400):
        house.is_mute, house.is_busy = rng.random() < 0.2, rng.random() < 0.3
        act(house, rng, number, texts, taken)
        house.seen += house.turn()
        over = [[*sequence.token_ids] for sequence in house.seen if sequence.ended]
        texts = [text for text in [*texts[:4], *over[-8:]] if len(text) < 70]
        house.now_s += rng.random() / 4
    house.is_mute = house.is_busy = False
    for freed in taken:
        house.give_back(freed)
    for _ in range(600):
        if not (len(house.local) or house.num_handoffs() or house.scheduler.active):
            break
        house.compute()
        house.arrive()
        house.decode()
        house.now_s += 0.3
    assert not house.pulls.waiting and not house.pulls.transfers.under_way and not house.scheduler.active
    assert house.all_let_go() and house.told
