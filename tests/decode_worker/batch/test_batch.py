"""However rows come, go, move and grow between two steps, the tensors are told the outcome."""

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.kernels.base.sampling_operands import IN_PROMPT
from common.ops import reference
from common.wire.values.sampling_params import SAMPLING_COLUMNS, SamplingParams
from decode_worker.batch.batch import DecodeBatch
from decode_worker.sequences.rows import NO_SLOT, UNSHARED, Clear, Fill, Grow, Rows, SharedPrefix
from decode_worker.sequences.sequence import DecodeSequence
from tests.support.layouts import one_table, pool_of
from tests.support.sequences import decode_sequence

MAX_ROWS, BLOCK_SIZE, MAX_BLOCKS, VOCAB = 6, 4, 12, 50
EVENT_NAMES = ["enter", "leave", "come_back", "share", "grow", "step", "apply"]
EVENTS = st.lists(st.tuples(st.sampled_from(EVENT_NAMES), st.integers(0, 1 << 20)), min_size=12)

DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@dataclass
class Row:
    """What a row holds, in the plainest way: every event is applied to it at once."""

    token: int
    seq_len: int
    sampling: SamplingParams
    blocks: list[int]
    prompt: list[int]
    counted: list[int]  # outputs before the last token
    prefix: SharedPrefix = UNSHARED

    def counts(self) -> list[int]:
        """By token."""
        return [self.counted.count(token) + IN_PROMPT * (token in self.prompt) for token in range(VOCAB)]


def grow(rows: Rows, sequence: DecodeSequence, block_id: int) -> None:
    """Give it another block."""
    block_ids = sequence.tables[0].block_ids
    rows.grown(sequence, 0, len(block_ids), block_id)
    block_ids.append(block_id)


class Pair:
    """Rows and their batch, beside a list that is told each event as it happens."""

    def __init__(self, device: str) -> None:
        if device == "cuda" and not torch.cuda.is_available():
            pytest.skip("needs a GPU")
        self.rows = Rows()
        self.batch = DecodeBatch(MAX_ROWS, BLOCK_SIZE * MAX_BLOCKS, pool_of(1, BLOCK_SIZE), VOCAB, torch.device(device))
        self.naive: list[Row] = []

    def enter(self, number: int) -> None:
        if len(self.naive) == MAX_ROWS:
            return
        length = 1 + number % (BLOCK_SIZE * 3)
        sampling = SamplingParams(
            temperature=number % 3 / 4, top_k=number % 7, top_p=number % 5 / 4, min_p=number % 2 / 8, seed=number << 40,
            presence_penalty=number % 3 / 2,
        )  # fmt: skip
        blocks = [number + i for i in range(-(-length // BLOCK_SIZE))]
        token_ids = [(number + i * i) % VOCAB for i in range(length)]
        self.rows.enter(decode_sequence(str(number), token_ids, 1, sampling, one_table(blocks, BLOCK_SIZE)))
        self.naive.append(Row(token_ids[-1], length, sampling, blocks, token_ids[:-1], []))

    def leave(self, number: int) -> None:
        if not self.naive:
            return
        row = number % len(self.naive)
        sequence = self.rows.sequences[row]
        self.rows.leave(sequence)
        sequence.tables = ()
        last = self.naive.pop()
        if row < len(self.naive):
            self.naive[row] = last

    def come_back(self, number: int) -> None:
        """Leave and enter again, as who sat out and got a block, or was late, before anything is told."""
        if self.naive:
            row = number % len(self.naive)
            sequence, naive = self.rows.sequences[row], self.naive[row]
            self.rows.leave(sequence)
            self.naive[row] = self.naive[-1]
            self.naive.pop()
            self.rows.enter(sequence)
            self.naive.append(naive)

    def share(self, number: int) -> None:
        """Rows by digits of `number`: of one number, or of none."""
        digits = [number // 3**row % 3 for row in range(len(self.naive))]
        prefixes = [SharedPrefix(digit, 4 + digit) if digit else UNSHARED for digit in digits]
        pairs = zip(self.rows.sequences, prefixes, strict=True)
        self.rows.share({sequence: prefix for sequence, prefix in pairs if prefix != UNSHARED})
        self.naive = [replace(row, prefix=prefix) for row, prefix in zip(self.naive, prefixes, strict=True)]

    def grow(self, number: int) -> None:
        if self.naive:
            row = number % len(self.naive)
            if len(self.naive[row].blocks) < MAX_BLOCKS:
                self.naive[row].blocks.append(number)
                grow(self.rows, self.rows.sequences[row], number)

    def step(self, number: int) -> None:
        """The host learns of the tokens later: here, never."""
        self.apply()
        tokens = [(number + row) % VOCAB for row in range(MAX_ROWS)]
        if all(row.seq_len < len(row.blocks) * BLOCK_SIZE for row in self.naive):
            batch = self.batch.forward_batch(MAX_ROWS)
            self.count()
            reference.advance(batch, torch.tensor(tokens, dtype=torch.int32, device=batch.token_ids.device))
            for sequence in self.rows.sequences:
                sequence.num_scheduled += 1
            self.naive = [
                replace(row, token=token, seq_len=row.seq_len + 1, counted=[*row.counted, row.token])
                for row, token in zip(self.naive, tokens, strict=False)
            ]

    def count(self) -> None:
        """What a step that adjusts logits does with the last tokens."""
        state, tensors = self.batch.state, self.batch.adjustments.tensors
        logits = torch.zeros(MAX_ROWS, VOCAB, device=state.token_ids.device)
        reference.adjust_logits(logits, state.sampling, state.state_slots, tensors, state.token_ids, state.seq_lens)

    def apply(self, _: int = 0) -> None:
        self.batch.apply(self.rows.take_changes())
        self.check()

    def check(self) -> None:
        state, sampling = self.batch.state, self.batch.state.sampling.rows(MAX_ROWS)
        assert len(self.rows) == len(self.naive)
        for i, row in enumerate(self.naive):
            device_row = [int(column[i]) for column in (state.token_ids, state.positions, state.seq_lens)]
            assert device_row == [row.token, row.seq_len - 1, row.seq_len]
            assert self.batch.block_tables[0][i, : len(row.blocks)].tolist() == row.blocks
            for column in SAMPLING_COLUMNS:
                assert getattr(sampling, column.name)[i] == getattr(row.sampling, column.name)
        self.check_prefixes()
        self.check_slots()
        padding = slice(len(self.naive), None)
        for zeroed in (state.positions, state.seq_lens, sampling.temperature):
            assert not zeroed[padding].any()

    def check_prefixes(self) -> None:
        """All rows, padding too; and what reading each once spares is by what is left of it."""
        prefixes = self.batch.forward_batch(MAX_ROWS, shares_prefixes=True).prefixes
        assert prefixes is not None and self.batch.forward_batch(MAX_ROWS).prefixes is None
        wanted = [row.prefix for row in self.naive]
        told = [
            SharedPrefix(*pair) for pair in zip(prefixes.numbers.tolist(), prefixes.num_tokens.tolist(), strict=True)
        ]
        assert told == wanted + [UNSHARED] * (MAX_ROWS - len(wanted))
        seen_before = [row for row, prefix in enumerate(wanted) if prefix in wanted[:row]]
        assert self.rows.num_spared == sum(wanted[row].num_tokens for row in seen_before)

    def check_slots(self) -> None:
        """Each row whose logits are adjusted has a slot of its own, with its counts; the others have none."""
        slots, counts = self.batch.state.state_slots.tolist(), self.batch.adjustments.tensors.counts
        adjusting = [i for i, row in enumerate(self.naive) if row.sampling.adjusts_logits]
        assert [i for i, slot in enumerate(slots) if slot != NO_SLOT] == adjusting
        assert len({slots[i] for i in adjusting}) == len(adjusting) == len(self.rows.state_slots)
        for i in adjusting:
            assert counts[slots[i]].tolist() == self.naive[i].counts()


@DEVICES
@given(events=EVENTS)
def test_the_tensors_are_what_applying_every_event_at_once_would_make_them(
    device: str, events: list[tuple[str, int]]
) -> None:
    pair = Pair(device)
    for name, number in events:
        getattr(pair, name)(number)
    pair.apply()


@DEVICES
def test_what_steps_have_counted_stays_when_rows_move(device: str) -> None:
    pair = Pair(device)
    for number in (1, 13, 25):  # sequences of two tokens, all adjusted
        pair.enter(number)
    pair.step(30)
    pair.leave(0)
    pair.enter(1)  # its slot is the next one's
    pair.step(40)
    pair.apply()
    assert [len(row.counted) for row in pair.naive] == [2, 2, 1]


@DEVICES
def test_rows_are_told_all_that_changes_of_what_they_share(device: str) -> None:
    pair = Pair(device)
    for number in range(5):
        pair.enter(number)
    pair.apply()
    by_row = [(1, 1, 2, 2, 0), (1, 1, 2, 2, 0), (2, 2, 1, 1, 1), (0, 2, 0, 2, 0), (0, 0, 0, 0, 0), (1, 0, 0, 1, 1)]
    for digits in by_row:
        pair.share(sum(digit * 3**row for row, digit in enumerate(digits)))
        pair.apply()
    pair.leave(0)  # the last takes its place, and what it shares along
    pair.apply()
    assert pair.batch.state.prefixes.numbers.tolist() == [1, -1, -1, 1, -1, -1]
    assert not pair.rows.take_changes()


@DEVICES
def test_a_table_that_fills_its_row_touches_no_other(device: str) -> None:
    pair = Pair(device)
    full = decode_sequence(
        "full", [1] * (BLOCK_SIZE * MAX_BLOCKS), 1, SamplingParams(), one_table(range(100, 100 + MAX_BLOCKS))
    )
    pair.batch.apply([Fill(1, full)])
    [tables] = pair.batch.block_tables
    assert tables[1].tolist() == full.tables[0].block_ids.tolist()
    assert not tables[0].any() and not tables[2:].any()
    pair.batch.apply([Clear(1), Grow(2, 0, MAX_BLOCKS - 1, 7), Grow(3, 0, 0, 8)])
    assert pair.batch.state.seq_lens.tolist() == [0] * MAX_ROWS
    assert [int(tables[2, -1]), int(tables[3, 0])] == [7, 8]
    assert not tables[2, :-1].any() and not tables[3, 1:].any()


@DEVICES
def test_a_sequence_longer_than_a_row_stays_within_it(device: str) -> None:
    """Nothing so long is admitted; if it were, its neighbours would not pay for it."""
    rows, batch = Rows(), Pair(device).batch
    neighbours = [
        decode_sequence(name, [1] * 5, 1, SamplingParams(), one_table([100 + i, 200 + i]))
        for i, name in enumerate("ab")
    ]
    long = decode_sequence(
        "long", [1] * (BLOCK_SIZE * MAX_BLOCKS + 2), 1, SamplingParams(), one_table(range(MAX_BLOCKS + 1))
    )
    for sequence in (neighbours[0], long, neighbours[1]):
        rows.enter(sequence)
    batch.apply(rows.take_changes())
    grow(rows, long, 99)
    batch.apply(rows.take_changes())
    step = batch.forward_batch(3)
    for _ in range(2):
        reference.advance(step, torch.zeros_like(step.token_ids))
    [tables] = batch.block_tables
    assert tables[1].tolist() == list(range(MAX_BLOCKS))
    for row, sequence in zip((0, 2), neighbours, strict=True):
        assert tables[row].tolist() == [*sequence.tables[0].block_ids, *[0] * (MAX_BLOCKS - 2)]
    assert step.seq_lens.tolist() == [7, BLOCK_SIZE * MAX_BLOCKS, 7]
    assert step.positions.tolist() == [6, BLOCK_SIZE * MAX_BLOCKS - 1, 6]


@DEVICES
def test_uploads_in_a_row_do_not_overwrite_one_another(device: str) -> None:
    """Nobody waits between these: what was sent first must arrive although its buffer is wanted again."""
    pair = Pair(device)
    wanted = []
    for i in range(40):
        blocks = [i * 100 + j for j in range(1 + i % MAX_BLOCKS)]
        pair.batch.apply(
            [Fill(i % MAX_ROWS, decode_sequence(str(i), [i] * 3, 1, SamplingParams(seed=i), one_table(blocks)))]
        )
        wanted.append((i % MAX_ROWS, i, blocks, pair.batch.block_tables[0].clone()))
    for row, _, blocks, tables in wanted:
        assert tables[row, : len(blocks)].tolist() == blocks
    for row, i, _, _ in wanted[-MAX_ROWS:]:
        assert [int(pair.batch.state.token_ids[row]), int(pair.batch.state.sampling.seed[row])] == [i, i]
