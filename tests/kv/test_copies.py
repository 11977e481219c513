"""Prompts of several groups from one pool into another, part of each ahead of its handoff: what arrives decodes on."""

import random
from collections.abc import Sequence

import pytest

from common.kv.copies import Missing, missing
from common.kv.tables import Tables, complete_blocks, held_by, num_seen, tables_handed_over
from common.settings.config import PrefillSection
from common.wire.values.kv_layout import KVLayout
from common.wire.values.pool_shape import PoolShape
from prefill_worker.sequence import PrefillSequence
from tests.support.allocator import BlockAllocator
from tests.support.group_model import LAYOUTS, GroupMemory, next_token
from tests.support.layouts import no_prefixes
from tests.support.sequences import prompt_scheduler, prompt_sequence, taken

BUDGET = 16


class Side:
    """A pool, and what is in it."""

    def __init__(self, layout: KVLayout, num_sequences: int) -> None:
        most = layout.most_blocks(70, BUDGET)
        self.shape = PoolShape(layout, tuple(count * num_sequences + 1 for count in most))
        self.allocator, self.memory = BlockAllocator(self.shape), GroupMemory(layout)

    def step(self, tables: Tables, position: int, token: int) -> int:
        begins = zip(tables, self.shape.begins, strict=True)
        within = [[block_id - begin for block_id in table.block_ids] for table, begin in begins]
        return self.memory.step(within, position, token)


class Way:
    """From a prefill worker's pool to a decode worker's; copies end at once."""

    def __init__(self, layout: KVLayout) -> None:
        self.layout, self.theirs, self.ours = layout, Side(layout, 2), Side(layout, 3)
        self.num_ahead = 0

    def copy(self, blocks: Missing) -> None:
        sources, targets = (
            side.shape.within_groups(ids)
            for side, ids in ((self.theirs, blocks.source_ids), (self.ours, blocks.target_ids))
        )
        for number, (of_group, ours) in enumerate(zip(sources, targets, strict=True)):
            for source, target in zip(of_group, ours, strict=True):
                self.ours.memory.copy(self.theirs.memory, number, source, target)


class Arriving:
    """A prompt on its way, with blocks of ours for all of it."""

    def __init__(self, way: Way, num_tokens: int) -> None:
        fresh = way.ours.allocator.allocate(num_seen(way.layout, num_tokens + 1))
        self.way, self.tables = way, tables_handed_over(way.layout, num_tokens, fresh)
        self.pulled: Sequence[Sequence[int]] = [[] for _ in self.tables]
        self.copied: list[int] = []

    def pull(self, block_ids: Sequence[int]) -> None:
        of_groups = self.way.theirs.shape.by_group(block_ids)
        blocks = missing(self.tables, of_groups, self.pulled)
        self.way.copy(blocks)
        self.pulled = of_groups
        self.copied += blocks.source_ids


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("seed", range(10))
def test_a_prompt_that_was_pulled_in_parts_goes_on_where_it_arrives(layout: KVLayout, seed: int) -> None:
    rng, way = random.Random(seed), Way(layout)
    section = PrefillSection(max_batch_tokens=BUDGET).on("cpu")
    scheduler = prompt_scheduler(section, way.theirs.allocator, 70, no_prefixes(way.theirs.allocator))
    arriving: dict[PrefillSequence, Arriving] = {}
    num_arrived = number = 0
    while num_arrived < 20:
        while len(arriving) < 2:
            asked = [rng.randrange(1000) for _ in range(rng.randint(1, 60))]
            sequence = prompt_sequence(f"r{number}", asked, turn=number)
            arriving[sequence] = Arriving(way, len(asked))
            scheduler.add(sequence)
            number += 1
        chunks = scheduler.schedule()
        scheduler.launched(chunks)
        for sequence, num_tokens in [(chunk.sequence, chunk.num_tokens) for chunk in chunks]:
            end = sequence.num_scheduled_tokens
            for position in range(end - num_tokens, end):
                token = way.theirs.step(sequence.tables, position, sequence.token_ids[position])
            scheduler.collected([sequence])
            if sequence.num_left and rng.random() < 0.7:
                arriving[sequence].pull(complete_blocks(sequence.tables, end))
                way.num_ahead += bool(arriving[sequence].copied)
            elif not sequence.num_left:
                prompt, arrived = sequence.token_ids, arriving.pop(sequence)
                block_ids = taken(scheduler, sequence)
                arrived.pull(block_ids)
                assert sorted(arrived.copied) == sorted(block_ids), "each block once"
                way.theirs.allocator.free(block_ids)
                following = way.ours.step(arrived.tables, len(prompt), token)
                assert following == next_token(layout, [*prompt, next_token(layout, prompt)])
                way.ours.allocator.free(held_by(arrived.tables))
                num_arrived += 1
    assert way.num_ahead or not any(group.is_append_only for group in layout.groups)
