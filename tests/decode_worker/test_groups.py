"""Sequences with several groups of blocks: whatever comes, waits, goes and grows, each token sees what it should."""

import random
from collections.abc import Sequence

import pytest
import torch

from common.kv.tables import held_by, num_seen, tables_handed_over, tables_of
from common.ops import reference
from common.wire.values.kv_layout import Counts, KVLayout
from common.wire.values.pool_shape import PoolShape, plus
from common.wire.values.sampling_params import SamplingParams
from decode_worker.batch.batch import DecodeBatch
from decode_worker.sequences.scheduler import DecodeScheduler
from decode_worker.sequences.sequence import DecodeSequence
from tests.decode_worker.bench import num_that_made_way
from tests.support.allocator import BlockAllocator
from tests.support.group_model import LAYOUTS, GroupMemory, next_token
from tests.support.sequences import blocks_of_rows, decode_sequence

MAX_ROWS, MAX_LEN, CHUNK = 5, 60, 6
Step = tuple[list[DecodeSequence], list[int]]


class Device:
    """Steps over the tensors of a batch, each as it is launched; the host learns of the tokens a step later."""

    def __init__(self, layout: KVLayout, num_blocks: Counts, rng: random.Random) -> None:
        self.layout, self.rng, self.shape = layout, rng, PoolShape(layout, num_blocks)
        self.memory, self.allocator = GroupMemory(layout), BlockAllocator(self.shape)
        self.scheduler = DecodeScheduler(self.allocator, MAX_ROWS, MAX_LEN, CHUNK)
        self.batch = DecodeBatch(MAX_ROWS, MAX_LEN, self.shape, 1000, torch.device("cpu"))
        self.num_rested = self.num_preempted = self.num_computed = self.num_handed_over = 0

    def compute_here(self, name: str, prompt: list[int], max_tokens: int) -> DecodeSequence | None:
        """As a decode worker does without a prefill worker: in chunks."""
        sequence = decode_sequence(name, prompt, 0, SamplingParams(max_tokens=max_tokens))
        num_slots = len(prompt) + (max_tokens > 1)
        counts, capacity = self.layout.most_blocks(num_slots, CHUNK), self.scheduler.capacity
        if not capacity.has_row() or not capacity.has_blocks(counts):
            return None
        sequence.tables = tables_of(self.layout, self.allocator.allocate(counts))
        capacity.count_row(sequence, 1)
        done, token = 0, -1
        while done < len(prompt):
            end = min(len(prompt), done + self.rng.randint(1, CHUNK))
            for table in sequence.tables:
                table.extend(done + 1, end)
            for position in range(done, end):
                token = self.memory.step(self._tables(sequence), position, prompt[position])
            done = end
        for table in sequence.tables:
            table.extend(len(prompt) + 1, num_slots)
            self.allocator.free(table.trim(len(prompt) + 1))
        self.scheduler.adopt(sequence, sequence.tables)
        sequence.token_ids.append(token)
        sequence.num_outputs += 1
        self.num_computed += 1
        return sequence

    def take_over(self, name: str, prompt: list[int], max_tokens: int) -> DecodeSequence | None:
        """As if handed over in a pool of all, with the token that follows the prompt."""
        token_ids = [*prompt, next_token(self.layout, prompt)]
        counts = num_seen(self.layout, len(token_ids))
        if not self.scheduler.capacity.has_row() or not self.scheduler.capacity.has_blocks(
            plus(counts, (1,) * len(counts))
        ):
            return None
        tables = tables_handed_over(self.layout, len(prompt), self.allocator.allocate(counts))
        sequence = decode_sequence(name, token_ids, 1, SamplingParams(max_tokens=max_tokens))
        source, blocks = GroupMemory(self.layout), [list(range(len(prompt) + 1)) for _ in self.layout.groups]
        for position, token in enumerate(prompt):
            source.step(blocks, position, token)
        for number, table in enumerate(tables):
            within = self.shape.within_groups(table.held)[number]
            for place, block in enumerate(within, table.num_gone):
                self.memory.copy(source, number, place, block)
        self.scheduler.reserve(sequence, tables)
        self.scheduler.activate(sequence)
        self.num_handed_over += 1
        return sequence

    def launch(self) -> Step:
        """What the loop does, and the step itself at once."""
        self.num_preempted += num_that_made_way(self.scheduler)
        self.num_rested += len(self.scheduler.slots.resting)
        self.batch.apply(self.scheduler.rows.take_changes())
        batch = self.batch.forward_batch(len(self.scheduler.rows))
        tokens = []
        for row, (position, token) in enumerate(zip(batch.positions.tolist(), batch.token_ids.tolist(), strict=True)):
            tables = [table[row].tolist() for table in batch.block_tables]
            tokens.append(self.memory.step(tables, position, token))
        reference.advance(batch, torch.tensor(tokens, dtype=torch.int32))
        return self.scheduler.launched(), tokens

    def collect(self, step: Step) -> None:
        for sequence, token in zip(*step, strict=True):
            if not sequence.ended:
                sequence.token_ids.append(token)
                sequence.num_outputs += 1
                if sequence.num_outputs == sequence.sampling.max_tokens:
                    self.scheduler.end(sequence)
        self.scheduler.collected(step[0])
        self.allocator.check(blocks_of_rows(self.scheduler))

    def _tables(self, sequence: DecodeSequence) -> Sequence[list[int]]:
        """As the device is told."""
        begins = zip(sequence.tables, self.shape.begins, strict=True)
        return [[block_id - begin for block_id in table.block_ids] for table, begin in begins]


def tight(layout: KVLayout) -> Counts:
    """For one long sequence and a few short ones; of what is bounded there is enough for all rows but one."""
    longest = zip(layout.groups, layout.most_blocks(MAX_LEN, CHUNK), strict=True)
    return tuple(most * 3 // 2 if group.is_append_only else most * (MAX_ROWS - 1) + 1 for group, most in longest)


@pytest.mark.medium
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("seed", range(12))
def test_texts_are_those_of_sequences_that_never_had_to_wait(layout: KVLayout, seed: int) -> None:
    rng = random.Random(seed)
    device, seen = Device(layout, tight(layout), rng), list[DecodeSequence]()
    in_flight: Step = ([], [])
    for number in range(250):
        prompt, max_tokens = [rng.randrange(1000) for _ in range(rng.randint(1, 14))], rng.randint(2, 46)
        arrive = rng.choice([device.compute_here, device.take_over])
        if rng.random() < 0.5 and (sequence := arrive(f"r{number}", prompt, max_tokens)) is not None:
            seen.append(sequence)
        if rng.random() < 0.03 and device.scheduler.active:
            device.scheduler.end(rng.choice(list(device.scheduler.active.values())))
        launched = device.launch()
        device.collect(in_flight)
        in_flight = launched
    device.collect(in_flight)
    assert device.num_rested and device.num_preempted and min(device.num_computed, device.num_handed_over) > 5
    for sequence in seen:
        ids = sequence.token_ids
        for position in range(len(ids) - sequence.num_outputs, len(ids)):
            assert ids[position] == next_token(layout, ids[:position])
    for sequence in list(device.scheduler.active.values()):
        device.scheduler.end(sequence)
    device.collect(([], []))
    assert device.allocator.num_free == device.allocator.capacity


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_sequence_has_no_more_blocks_than_its_groups_ever_see(layout: KVLayout) -> None:
    device = Device(layout, tuple(60 for _ in layout.groups), random.Random(0))
    sequence = device.compute_here("a", list(range(20)), 39)
    assert sequence is not None
    for _ in range(38):
        device.collect(device.launch())
        held = device.shape.by_group(held_by(sequence.tables))
        counts = layout.most_blocks(sequence.num_scheduled, 1)
        assert all(len(block_ids) <= most for block_ids, most in zip(held, counts, strict=True))
