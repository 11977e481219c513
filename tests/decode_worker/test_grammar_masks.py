"""Masks that come when they come: rows under a grammar wait for theirs, lose nothing, and nobody else notices.

The real loop, scheduler and batch. A step runs when the test lets it, its grammars answer when they like, and the model
is a function of all keys before a token.
"""

import random
from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
import pytest
import torch

from common.device.steps.loop_trace import Trace
from common.device.steps.output_ring import RingLanding, StepOutput
from common.grammar.follower import Follower, Outcome
from common.grammar.followers import Followers
from common.grammar.sequence_grammars import SequenceGrammars
from common.ops import reference
from common.ops.sampler import AdjustedRows, Sampler
from common.wire.values.packing import pack_ids
from common.wire.values.sampling_params import SamplingParams
from decode_worker.batch.batch import DecodeBatch
from decode_worker.grammar_masks import MaskMemory
from decode_worker.sequences.scheduler import DecodeScheduler
from decode_worker.sequences.sequence import MAX_LATE, DecodeSequence
from tests.decode_worker.bench import reserved
from tests.decode_worker.test_worker import Rig
from tests.support.adjusting import adjusted
from tests.support.layouts import pool_of
from tests.support.sequences import blocks_of_rows, decode_sequence

BLOCK_SIZE, MAX_LEN, MAX_ROWS, VOCAB, STOP = 16, 512, 6, 70, 3
CPU = torch.device("cpu")


def logits_after(keys: Sequence[int]) -> torch.Tensor:
    """Depends on every token so far, in order."""
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(hash(tuple(keys)) % (1 << 40)))


def what_follows(outputs: Sequence[int]) -> Outcome:
    """A grammar: a few tokens after each text, and now and then its end."""
    rng = random.Random(hash(tuple(outputs)))
    if outputs and rng.random() < 0.03:
        return Outcome(is_over=True)
    allowed = np.zeros(96, bool)
    allowed[rng.sample(range(VOCAB), 5)] = True
    return Outcome(np.packbits(allowed, bitorder="little").view(np.int32))


class LateFollowers:
    """Answers when it likes."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.known: dict[DecodeSequence, list[int]] = {}
        self.asked: list[DecodeSequence] = []

    def ask(self, owner: DecodeSequence, follower: Follower, token_ids: Sequence[int]) -> None:
        assert owner not in self.asked, "one thing at a time"
        self.known.setdefault(owner, []).extend(token_ids)
        self.asked.append(owner)

    def take(self) -> list[tuple[DecodeSequence, Outcome]]:
        taken = [owner for owner in self.asked if self.rng.random() < 0.3]
        self.asked = [owner for owner in self.asked if owner not in taken]
        return [(owner, what_follows(self.known[owner])) for owner in taken]

    def close(self) -> None:
        pass


class Device:
    """Runs a step when its outcome, or the next launch, needs it: by then more masks may be there."""

    def __init__(self, rng: random.Random) -> None:
        self.batch = DecodeBatch(MAX_ROWS, MAX_LEN, pool_of(1, BLOCK_SIZE), VOCAB, CPU)
        self.trace = Trace()
        self.landing, self.sampler = RingLanding(MAX_ROWS, CPU), Sampler("torch", MAX_ROWS, VOCAB, CPU)
        self.keys: dict[int, int] = {}
        self.rng, self.shares_prefixes, self.spared_bytes = rng, True, 0
        self.waiting: Step | None = None
        self.num_late = self.num_steps = 0

    def launch(self, num_rows: int, *, has_logprobs: bool, spared_bytes: int) -> "Step":
        self.waiting = Step(self, num_rows)
        return self.waiting

    def run(self, num_rows: int) -> StepOutput:
        batch, state = self.batch.forward_batch(num_rows), self.batch.state
        slots = reference.row_slots(batch.positions, batch.seq_lens, batch.block_tables[0], BLOCK_SIZE)
        for slot, token in zip(slots.tolist(), batch.token_ids.tolist(), strict=True):
            self.keys[slot] = token
        logits = torch.stack([logits_after(self._context(row)) for row in range(num_rows)])
        sampling = self.batch.state.sampling.rows(num_rows)
        rows = AdjustedRows(state.state_slots[:num_rows], batch.token_ids, batch.seq_lens)
        self.sampler.adjust(logits, sampling, rows, self.batch.adjustments.tensors, self.batch.grammars)
        self.num_late += int((logits.amax(-1) == -torch.inf).sum())
        self.num_steps += 1
        self.sampler.sample_and_advance(logits, sampling, batch, self.landing.ring)
        return self.landing.launched(num_rows, num_rows).output()

    def _context(self, row: int) -> list[int]:
        state = self.batch.state
        table, seq_len = self.batch.block_tables[0][row].tolist(), int(state.seq_lens[row])
        return [self.keys[table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE] for p in range(seq_len)]


class Step:
    """Pending until somebody needs it."""

    def __init__(self, device: Device, num_rows: int) -> None:
        self.device, self.num_rows, self.num_run = device, num_rows, num_rows
        self.result: StepOutput | None = None

    def ready(self) -> bool:
        if self.device.rng.random() < 0.4:
            self.output()
        return self.result is not None

    def output(self) -> StepOutput:
        if self.result is None:
            self.result = self.device.run(self.num_rows)
        return self.result


class GuidedRig(Rig):
    """A decode worker whose steps are real but for their model."""

    def __init__(self, seed: int, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.rng = random.Random(seed)
        self.device, self.followers = Device(self.rng), LateFollowers(self.rng)
        worker = self.worker
        worker.grammars.followers.close()
        apply = self.device.batch.apply

        def apply_behind_the_last_step(changes: Any) -> None:
            if self.device.waiting is not None:
                self.device.waiting.output()
            apply(changes)

        cast(Any, self.device.batch).apply = apply_behind_the_last_step
        cast(Any, worker.steps).runner, cast(Any, worker.steps).batch = self.device, self.device.batch
        followers = cast(Followers[DecodeSequence], self.followers)
        worker.grammars = worker.inbox.grammars = worker.outputs.grammars = SequenceGrammars(followers)
        worker.masks = worker.outputs.masks = MaskMemory(self.device.batch.grammars)
        worker.steps.grammars, worker.steps.masks = worker.grammars, worker.masks
        worker.scheduler.capacity.max_num_seqs = MAX_ROWS

    @property
    def scheduler(self) -> DecodeScheduler:
        return self.worker.scheduler

    def arrive(self, name: str, prompt: list[int], sampling: SamplingParams) -> DecodeSequence:
        """A prompt whose KV is complete but for its last token, the first output."""
        sequence = decode_sequence(name, prompt, 1, sampling)
        assert reserved(self.scheduler, sequence)
        for position, token in enumerate(prompt[:-1]):
            slot = sequence.tables[0].block_ids[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
            self.device.keys[slot] = token
        self.worker.grammars.begin(sequence)
        self.worker.masks.enter(sequence)
        self.scheduler.activate(sequence)
        return sequence


def expected(sequence: DecodeSequence, num_prompt: int, num_tokens: int) -> list[int]:
    """What it would be alone, with every mask at hand."""
    ids, sampling = list(sequence.token_ids[: num_prompt + 1]), sequence.sampling
    while len(ids) < num_tokens:
        outputs = ids[num_prompt:]
        logits = logits_after(ids)
        if sampling.grammar:
            mask = what_follows(outputs).mask
            assert mask is not None, "the text has ended"
            allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCAB].astype(bool)
            logits[~torch.from_numpy(allowed)] = -torch.inf
        ids.append(int(adjusted(logits, sampling, ids[:num_prompt], outputs).argmax()))
    return ids


@pytest.fixture(params=range(12))
def rig(request: pytest.FixtureRequest) -> Iterator[GuidedRig]:
    rig = GuidedRig(request.param, num_blocks=24 if request.param % 2 else 200)
    yield rig
    rig.close()


@pytest.mark.medium
def test_texts_are_those_of_grammars_that_are_never_late(rig: GuidedRig) -> None:
    rng, seen = rig.rng, dict[str, tuple[DecodeSequence, int]]()
    for number in range(400):
        length = rng.randint(2, 40)
        if rng.random() < 0.3 and rig.scheduler.capacity.has_room(length):
            sampling = SamplingParams(
                temperature=0.0,
                max_tokens=rng.randint(2, 60),
                grammar=rng.choice(["", "some", "some"]),
                stop_token_ids=rng.choice([(), (STOP,)]),
                presence_penalty=rng.choice([0.0, 1.5]),
                frequency_penalty=rng.choice([0.0, 0.25]),
            )
            sequence = rig.arrive(f"r{number}", [rng.randrange(VOCAB) for _ in range(length)], sampling)
            seen[sequence.request.request_id] = sequence, length - 1
        if rng.random() < 0.03 and rig.scheduler.active:
            rig.scheduler.end(rng.choice(list(rig.scheduler.active.values())))
        rig.turn()
        rig.allocator.check(blocks_of_rows(rig.scheduler))
    assert rig.device.num_late > 20, "no mask was late"
    for sequence in list(rig.scheduler.active.values()):
        rig.scheduler.end(sequence)
    num_guided = 0
    for name, (sequence, num_prompt) in seen.items():
        assert sequence.token_ids == expected(sequence, num_prompt, len(sequence.token_ids)), name
        unsent = int(sequence.grammar is not None and sequence.grammar.held is not None)
        outputs = sequence.token_ids[num_prompt + 1 : len(sequence.token_ids) - unsent]
        assert rig.sent(name) == outputs
        num_guided += len(outputs) * bool(sequence.sampling.grammar)
    assert num_guided > 100


def test_a_lone_row_that_waits_for_its_mask_keeps_no_device_busy() -> None:
    rig = GuidedRig(1, num_blocks=50)
    try:
        sequence = rig.arrive("a", [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=40, grammar="some"))
        rig.followers.rng = cast(random.Random, type("Never", (), {"random": lambda self: 1.0})())
        for _ in range(50):
            rig.turn()
        assert rig.device.num_steps == 0 and sequence.num_scheduled == 3
        rig.followers.rng = rig.rng
        rig.turn_until(lambda: sequence.ended)
        assert sequence.token_ids == expected(sequence, 2, len(sequence.token_ids))
    finally:
        rig.close()


def test_steps_do_without_a_row_whose_grammar_is_slow_until_its_mask_is_there() -> None:
    rig = GuidedRig(1, num_blocks=50)
    try:
        slow = rig.arrive("slow", [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=40, grammar="some"))
        free = rig.arrive("free", [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=400))
        rig.followers.rng = cast(random.Random, type("Never", (), {"random": lambda self: 1.0})())
        rig.turn_until(lambda: free.num_outputs > 60)
        num_late = rig.device.num_late
        rig.turn_until(lambda: free.num_outputs > 90)
        assert rig.device.num_late == num_late <= MAX_LATE + 2, "steps that are in flight do not know yet"
        assert slow.row < 0 and not rig.scheduler.slots.is_starved(rig.scheduler.lingering)
        rig.followers.rng = rig.rng
        rig.turn_until(lambda: slow.ended)
        assert slow.token_ids == expected(slow, 2, len(slow.token_ids))
    finally:
        rig.close()


def test_allowed_tokens_and_a_grammar_that_share_none_end_the_request(rig: GuidedRig) -> None:
    mask = what_follows([5]).mask
    assert mask is not None
    others = np.flatnonzero(~np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCAB].astype(bool)).tolist()
    sampling = SamplingParams(temperature=0.0, grammar="some", allowed_token_ids=pack_ids(others))
    rig.arrive("stuck", [1, 2, 5], sampling)
    free = rig.arrive("free", [1, 2, 5], SamplingParams(temperature=0.0, max_tokens=30))
    rig.turn_until(lambda: bool(rig.failed("stuck")) and free.ended)
    assert not rig.sent("stuck") and free.token_ids == expected(free, 2, len(free.token_ids))


def test_all_rows_may_change_hands_twice_while_two_steps_are_in_flight() -> None:
    rig, sampling = GuidedRig(0, num_blocks=200), SamplingParams(max_tokens=50, grammar="some")

    def arrive(name: str) -> list[DecodeSequence]:
        arrived = [rig.arrive(f"{name}-{row}", [1, 2], sampling) for row in range(MAX_ROWS)]
        while rig.followers.asked:
            rig.worker.outputs.handle_answers()
        return arrived

    try:
        for name in "ab":
            sequences = arrive(name)
            rig.worker.steps.launch()
            assert rig.worker.steps.in_flight[-1].sequences == sequences
            for sequence in sequences:
                rig.scheduler.end(sequence)
        arrive("c")
        places = {sequence.mask_slot.place for sequence in rig.worker.masks._places}
        assert len(places) == 3 * MAX_ROWS, "none is another's while a step may read there"
    finally:
        rig.close()
