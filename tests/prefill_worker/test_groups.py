"""Prompts that begin alike in pools of several groups: a memory server's index, a scheduler, and a made-up model."""

import random
from typing import cast

import pytest

from common.memory.blocks.pool import User
from common.memory.client.lease_cache import LeaseCache
from common.memory.server.pools import Pools
from common.serving.prompts.checkpoints import StateCopy
from common.serving.prompts.prefixes import PromptPrefixes
from common.serving.prompts.scheduler import Chunk
from common.serving.prompts.stops import FIRST_TOKENS
from common.settings.config import PrefillSection
from common.settings.memory_sections import KVSection
from common.wire.messages.memory import BlocksLeased, MemoryMessage, OfBlocks, PoolShortage, PromptBlocks
from common.wire.values.block_key import digests, pack_keys, root_of
from common.wire.values.kv_layout import Counts, KVLayout
from common.wire.values.packing import pack_ids
from common.wire.values.pool_shape import PoolShape
from prefill_worker.sequence import PrefillSequence
from prefill_worker.worker import stock
from tests.memory.parties import Bytes
from tests.support.allocator import check_owned
from tests.support.group_model import GroupMemory, next_token
from tests.support.layouts import full, state, window
from tests.support.sequences import is_ending, prompt_scheduler, prompt_sequence, taken

BLOCK, STEP_TOKENS = 4, 20
US, OTHER = 1, 2
FULL, WINDOW = full(1, 1, 1, BLOCK, "float32"), window(BLOCK, 7)
LAYOUTS = {
    "window": KVLayout("model", (WINDOW,)),
    "windowed": KVLayout("model", (FULL, WINDOW)),
    "states": KVLayout("model", (FULL, state(3))),
    "hybrid": KVLayout("model", (FULL, WINDOW, state(3), state(5))),
}


class House:
    """A prefill worker's scheduler, its memory server, and a device that computes each step at once."""

    def __init__(self, layout: KVLayout, num_blocks: Counts, max_len: int = 1000) -> None:
        self.shape = PoolShape(layout, tuple(count + 1 for count in num_blocks))
        self.pools, self.said = Pools(Bytes, 0.0, poisons=False), list[MemoryMessage]()
        for client in (US, OTHER):
            self.pools.want(User(client, ("w", client), client == OTHER), layout, self.shape.num_blocks)
        self.index = self.pools.of_client[US].index
        self.num_short, self.computes = 0, True
        self.leases = LeaseCache(self.shape, self.said.append, clock=lambda: 0.0)
        self.num_found = 0
        self.prefixes = PromptPrefixes(self.leases, self._found, KVSection(prefix_min_tokens=0))
        limits = PrefillSection(max_batch_tokens=STEP_TOKENS).on("cuda")
        self.scheduler = prompt_scheduler(limits, self.leases, max_len, self.prefixes)
        self.memory, self.texts = GroupMemory(layout), dict[PrefillSequence, int]()
        self.num_added = 0

    def _found(self, prompt: PrefillSequence) -> None:
        self.num_found += prompt.num_scheduled_tokens

    def add(self, token_ids: list[int]) -> PrefillSequence:
        self.num_added += 1
        prompt = prompt_sequence(f"r{self.num_added}", token_ids, turn=self.num_added)
        self.scheduler.add(prompt)
        self.texts[prompt] = -1
        return prompt

    def compute(self, token_ids: list[int]) -> int:
        """Compute a prompt alone; return the tokens found."""
        self.num_found = 0
        self.add(token_ids)
        while self.scheduler.prompts:
            assert self.step()
        return self.num_found

    def is_resumable(self, token_ids: list[int]) -> bool:
        """Whether another text would be found as far as this one's last full block."""
        size = self.shape.layout.block_size
        keys = pack_keys(digests(root_of(self.shape.layout), pack_ids(token_ids[:-1]), size))
        return self.index.sealed.find(keys).num_places == (len(token_ids) - 1) // size

    def exchange(self) -> None:
        self.leases.update(stock(self.shape.layout, self.shape.shares, STEP_TOKENS), self.shape.layout.nothing)
        while self.said:
            for client, message, _ in self.pools.handle(US, cast(OfBlocks, self.said.pop(0))):
                if client != US:
                    continue
                match message:
                    case PromptBlocks():
                        self.prefixes.receive(message)
                    case BlocksLeased():
                        self.leases.receive(message)
                    case PoolShortage():
                        self.leases.demand.shortage(is_short=message.is_short)
                        self.num_short += message.is_short

    def step(self) -> int:
        """Launch and collect a step; return its tokens."""
        chunks: list[Chunk[PrefillSequence]] = []
        for _ in range(3):
            self.exchange()
            if chunks := self.scheduler.schedule():
                break
        for chunk in chunks:
            self._compute(chunk)
        self.scheduler.launched(chunks)
        prompts = [chunk.sequence for chunk in chunks]
        self.scheduler.collected(prompts)
        self.prefixes.computed([(each, each.num_scheduled_tokens) for each in prompts], self.scheduler.waiting)
        for prompt in prompts:
            if is_ending(self.scheduler, prompt):
                self.leases.free(taken(self.scheduler, prompt))
        self.exchange()
        return sum(chunk.num_tokens for chunk in chunks)

    def _compute(self, chunk: Chunk[PrefillSequence]) -> None:
        if not self.computes:
            return
        for copy in chunk.found_states:
            self._copy(copy)
        prompt, begin = chunk.sequence, chunk.sequence.num_scheduled_tokens
        tables = [
            [block_id - first for block_id in table.block_ids]
            for table, first in zip(prompt.tables, self.shape.begins, strict=True)
        ]
        for position in range(begin, begin + chunk.num_tokens):
            self.texts[prompt] = self.memory.step(tables, position, prompt.token_ids[position])
        for copy in chunk.snapshots:
            self._copy(copy)

    def _copy(self, copy: StateCopy) -> None:
        group = self.shape.group_of(copy.source_id)
        first = self.shape.begins[group]
        self.memory.copy(self.memory, group, copy.source_id - first, copy.target_id - first)


def some(layout: KVLayout, *, of_tokens: int, of_windows: int, of_states: int) -> Counts:
    """Return numbers of blocks by the kind of each group."""
    return tuple(of_windows if group.window else of_tokens if group.grows else of_states for group in layout.groups)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("seed", range(4))
def test_every_prompt_is_followed_by_its_token_whatever_it_shares_with_whom(layout: KVLayout, seed: int) -> None:
    rng = random.Random(seed)
    house = House(layout, some(layout, of_tokens=40, of_windows=24, of_states=5))
    stems = [[rng.randrange(1000) for _ in range(60)] for _ in range(3)]
    num_tokens = 0
    for _ in range(300):
        if rng.random() < 0.5 and len(house.scheduler.prompts) < 6:
            stem = rng.choice(stems)
            text = stem[: rng.randint(1, 60)] + [rng.randrange(1000) for _ in range(rng.randint(0, 9))]
            num_tokens += len(text)
            house.add(text)
        if rng.random() < 0.05 and house.scheduler.prompts:
            prompt = rng.choice(list(house.scheduler.prompts.values()))
            house.scheduler.remove(*prompt.key)
            del house.texts[prompt]
        house.step()
    while house.scheduler.prompts:
        assert house.step(), "a prompt waits for ever"
    for prompt, token in house.texts.items():
        assert token == next_token(layout, list(prompt.token_ids))
    assert house.num_found > num_tokens // 20
    check_owned(house.leases, [])
    assert not len(house.leases.references) and not house.prefixes.computing


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_text_is_resumed_at_its_last_full_block_and_where_another_left_it(layout: KVLayout) -> None:
    house = House(layout, some(layout, of_tokens=100, of_windows=60, of_states=9))
    text = list(range(50))
    found = list(map(house.compute, (text, [*text, 1, 2], [*text[:30], *text], [*text[:30], 7, 8, 9, 7, 8])))
    has_place = layout.groups[0].is_append_only  # with windows alone, nothing tells where texts part
    assert found == [0, 48, 0, 28 if has_place else 0]


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_prompt_of_any_length_evicts_few_checkpoints_of_other_texts(layout: KVLayout) -> None:
    house = House(layout, some(layout, of_tokens=1300, of_windows=120, of_states=40), max_len=5000)
    house.computes = False
    texts = [[number] * 18 for number in range(30)]
    for text in texts:
        house.compute(text)
    assert all(map(house.is_resumable, texts))
    long = list(range(100, 4100))
    house.compute(long)
    assert sum(map(house.is_resumable, texts)) >= 25 and house.is_resumable(long)
    parting = 2 * FIRST_TOKENS + 500
    if not layout.states:  # snapshots are taken at the ends of chunks only
        assert house.compute([*long[:parting], *range(30)]) == 2 * FIRST_TOKENS


@pytest.mark.parametrize(("begin", "num_tokens"), [(FIRST_TOKENS - 16, 16), (FIRST_TOKENS - 12, STEP_TOKENS)])
def test_a_chunk_is_cut_at_a_doubling_unless_that_loses_much(begin: int, num_tokens: int) -> None:
    house = House(LAYOUTS["states"], some(LAYOUTS["states"], of_tokens=900, of_windows=0, of_states=9), max_len=5000)
    house.computes = False
    prompt = house.add(list(range(2000)))
    assert house.step()
    prompt.num_scheduled_tokens = begin
    for table in prompt.tables:
        table.extend(begin + 1, begin)
    assert house.step() == num_tokens


def test_stock_never_waits_for_states() -> None:
    layout = LAYOUTS["states"]
    house = House(layout, some(layout, of_tokens=400, of_windows=0, of_states=40))
    house.index.lease(OTHER, (0, house.index.num_free[1] - 1))
    prompt = house.add(list(range(30)))
    assert house.step() and prompt.is_started, "the last state is for a prompt"
    for _ in range(5):
        house.exchange()
    assert not house.num_short and any(house.leases.num_free)


def test_a_prompt_holds_blocks_for_the_snapshots_that_it_takes_and_no_more() -> None:
    house = House(LAYOUTS["states"], some(LAYOUTS["states"], of_tokens=900, of_windows=0, of_states=20), max_len=5000)
    house.computes = False
    text = list(range(2000))
    for num_found, num_spare in ((0, 2), (1996, 0)):
        prompt = house.add(text)
        house.exchange()
        assert prompt.beginning.grant is not None and prompt.num_scheduled_tokens == num_found
        assert len(prompt.beginning.grant.fresh[1]) == 1 + num_spare, "one at 1,024 tokens and one at the end"
        while house.scheduler.prompts:
            assert house.step()


def test_nobody_waits_for_a_snapshot_that_will_not_come() -> None:
    layout = LAYOUTS["states"]
    house = House(layout, some(layout, of_tokens=400, of_windows=0, of_states=20))
    house.index.lease(OTHER, (0, house.index.num_free[1] - 2))
    first = house.add(list(range(60)))
    assert house.step() == STEP_TOKENS and not any(table.spare for table in first.tables)
    second = house.add(list(range(60)))
    house.exchange()
    assert second.has_blocks and not house.prefixes.is_held_up(second)


def test_a_prompt_waits_for_the_one_of_an_earlier_turn_though_another_is_further() -> None:
    house = House(LAYOUTS["states"], some(LAYOUTS["states"], of_tokens=400, of_windows=0, of_states=9))
    early, waiting, late = (house.add(list(range(60))) for _ in range(3))
    early.beginning.stop, late.beginning.stop = 3, 5
    house.prefixes.computing = {each.beginning.digests[each.beginning.stop - 1]: each for each in (late, early)}
    house.exchange()
    assert house.prefixes.is_held_up(waiting)
    del house.prefixes.computing[early.beginning.digests[2]]
    assert not house.prefixes.is_held_up(waiting)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_equal_prompts_are_computed_once(layout: KVLayout) -> None:
    house = House(layout, some(layout, of_tokens=200, of_windows=90, of_states=9))
    text = list(range(70))
    for _ in range(3):
        house.add(text)
    num_computed = 0
    while house.scheduler.prompts:
        num_computed += house.step()
    last = (len(text) - 1) // BLOCK * BLOCK
    assert num_computed == len(text) + 2 * (len(text) - last)
