"""A pool too small: a resting sequence neither advances nor writes KV nor gets a token, and goes on as before.

Real rows, scheduler and batch; the model is a function of the last token and all keys before it.
"""

import random

import pytest
import torch

from common.ops import reference
from common.wire.values.sampling_params import SamplingParams
from decode_worker.batch.batch import DecodeBatch
from decode_worker.sequences.scheduler import DecodeScheduler
from decode_worker.sequences.sequence import DecodeSequence
from tests.decode_worker.bench import num_that_made_way, reserved
from tests.support.allocator import check_owned
from tests.support.layouts import allocator_of, pool_of
from tests.support.sequences import blocks_of_rows, decode_sequence

BLOCK_SIZE, MAX_LEN, MAX_ROWS = 4, 64, 6
Step = tuple[list[DecodeSequence], list[int]]


def next_token(keys: list[int]) -> int:
    """Depends on every token so far, in order."""
    return hash(tuple(keys)) % 1000


class Device:
    """Runs steps over the batch; a slot of `keys` holds the token whose KV was written there."""

    def __init__(self, num_blocks: int) -> None:
        self.keys: dict[int, int] = {}
        self.scheduler = DecodeScheduler(allocator_of(num_blocks, BLOCK_SIZE), MAX_ROWS, MAX_LEN)
        self.batch = DecodeBatch(MAX_ROWS, MAX_LEN, pool_of(num_blocks, BLOCK_SIZE), 300, torch.device("cpu"))
        self.num_rested = self.num_preempted = 0

    def arrive(self, name: str, prompt: list[int], max_tokens: int) -> None:
        """A prompt whose KV is complete but for its last token."""
        sequence = decode_sequence(name, prompt, 1, SamplingParams(max_tokens=max_tokens))
        assert reserved(self.scheduler, sequence)
        for position, token in enumerate(prompt[:-1]):
            self.keys[sequence.tables[0].block_ids[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE] = token
        self.scheduler.activate(sequence)

    def launch(self) -> Step:
        """What the loop does, and the step itself at once."""
        self.num_preempted += num_that_made_way(self.scheduler)
        self.num_rested += len(self.scheduler.slots.resting)
        self.batch.apply(self.scheduler.rows.take_changes())
        num_rows = len(self.scheduler.rows)
        batch = self.batch.forward_batch(num_rows)
        slots = reference.row_slots(batch.positions, batch.seq_lens, batch.block_tables[0], BLOCK_SIZE)
        for slot, token in zip(slots.tolist(), batch.token_ids.tolist(), strict=True):
            self.keys[slot] = token
        tokens = [next_token(self._context(row)) for row in range(num_rows)]
        reference.advance(batch, torch.tensor(tokens, dtype=torch.int32))
        return self.scheduler.launched(), tokens

    def collect(self, step: Step) -> None:
        sequences, tokens = step
        for sequence, token in zip(sequences, tokens, strict=True):
            if not sequence.ended:
                sequence.token_ids.append(token)
                sequence.num_outputs += 1
                if sequence.num_outputs == sequence.sampling.max_tokens:
                    self.scheduler.end(sequence)
        self.scheduler.collected(sequences)
        check_owned(self.scheduler.allocator, blocks_of_rows(self.scheduler))

    def _context(self, row: int) -> list[int]:
        state = self.batch.state
        table, seq_len = self.batch.block_tables[0][row].tolist(), int(state.seq_lens[row])
        return [self.keys[table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE] for p in range(seq_len)]


@pytest.mark.medium
@pytest.mark.parametrize("seed", range(20))
def test_texts_are_those_of_sequences_that_never_had_to_wait(seed: int) -> None:
    rng, device = random.Random(seed), Device(num_blocks=18)
    scheduler, seen = device.scheduler, dict[str, DecodeSequence]()
    in_flight: Step = ([], [])
    for number in range(300):
        length = rng.randint(1, 12)
        if scheduler.capacity.has_room(length):
            device.arrive(f"r{number}", [rng.randrange(1000) for _ in range(length)], rng.randint(2, 40))
        if rng.random() < 0.05 and scheduler.active:
            scheduler.end(rng.choice(list(scheduler.active.values())))
        seen |= {sequence.request.request_id: sequence for sequence in scheduler.active.values()}
        launched = device.launch()
        device.collect(in_flight)
        in_flight = launched
    assert device.num_rested > 20 and device.num_preempted
    for sequence in seen.values():
        ids = list(sequence.token_ids)
        for position in range(len(ids) - sequence.num_outputs + 1, len(ids)):
            assert ids[position] == next_token(ids[:position])
