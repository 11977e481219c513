"""Whatever comes, goes, sits out and is evicted: rows that the device is told share a prefix do, at every step.

The real scheduler, rows, batch, prompts and memory server's index; prompts and replies find what others have computed.
"""

import random
from itertools import count

import pytest
import torch

from common.kernels.base.row_operands import HEAD_WORDS, RowUpdates
from common.ops import reference
from common.wire.messages.memory import BlocksFreed
from common.wire.values.sampling_params import SamplingParams
from decode_worker.batch.batch import DecodeBatch
from decode_worker.batch.prefix_sharing import MIN_TOKENS, REST, PrefixSharing
from decode_worker.sequences.rows import UNSHARED, Rows, SharedPrefix
from decode_worker.sequences.sequence import DecodeSequence
from tests.decode_worker.arrivals.test_local_prompts import LocalHouse, act
from tests.decode_worker.bench import BLOCK_SIZE
from tests.support.layouts import one_table, tiny, window
from tests.support.sequences import decode_sequence

MAX_ROWS, MAX_LEN = 8, 1000
MOST_PROMPTS = 12
"""Prompts beside which texts of one prompt are asked for; a long queue is gone through at each message."""


class SharingHouse(LocalHouse):
    """Its steps are launched as the loop does it, with a batch that is told all changes."""

    def __init__(self, num_blocks: int, level: int) -> None:
        super().__init__(num_blocks=num_blocks, level=level, max_num_seqs=MAX_ROWS)
        ticks = count()
        self.sharing = PrefixSharing(self.leases.shape.layout.groups[0], clock=lambda: self.now_s + next(ticks) / 200)
        self.sharing._min_places = 2
        self.batch = DecodeBatch(MAX_ROWS, MAX_LEN, self.leases.shape, 300, torch.device("cpu"))
        self._update, self.batch._update = self.batch._update, self.update
        scheduler = self.scheduler
        self._launched, self._preempt = scheduler.launched, scheduler.preempt
        scheduler.launched, scheduler.preempt = self.launched, self.preempt  # type: ignore[method-assign]
        self.num_spared = self.num_rows = self.num_preempted = 0

    def launched(self) -> list[DecodeSequence]:
        rows = self.scheduler.rows
        self.sharing.regroup(rows)
        self.batch.apply(rows.take_changes())
        self.check_prefixes(rows)
        step = self.batch.forward_batch(len(rows))
        reference.advance(step, torch.zeros(len(rows), dtype=torch.int32))
        return self._launched()

    def update(self, updates: RowUpdates) -> None:
        """A GPU writes words in any order: no place may be named with two."""
        words = updates.words.tolist()
        heads, entries = words[: HEAD_WORDS * updates.num_rows], words[HEAD_WORDS * updates.num_rows :]
        rows, places = heads[::HEAD_WORDS], entries[: updates.num_entries]
        named = set(zip(places, entries[updates.num_entries : 2 * updates.num_entries], strict=True))
        assert len(rows) == len(set(rows)) and len(named) == len(set(places))
        self._update(updates)

    def preempt(self) -> DecodeSequence:
        self.num_preempted += 1
        return self._preempt()

    def check_prefixes(self, rows: Rows) -> None:
        """By what is on the device alone."""
        step = self.batch.forward_batch(MAX_ROWS, shares_prefixes=True)
        assert step.prefixes is not None
        groups: dict[int, list[int]] = {}
        for row, number in enumerate(step.prefixes.numbers.tolist()):
            if number >= 0:
                groups.setdefault(number, []).append(row)
        tables, num_tokens = step.block_tables[0].tolist(), step.prefixes.num_tokens.tolist()
        num_spared = 0
        for number, members in groups.items():
            num_shared, first = num_tokens[members[0]], members[0]
            assert 0 <= number < MAX_ROWS and num_shared % BLOCK_SIZE == 0
            assert {num_tokens[row] for row in members} == {num_shared} != {0}
            assert all(num_shared < int(step.seq_lens[row]) for row in members)
            places = num_shared // BLOCK_SIZE
            assert all(tables[row][:places] == tables[first][:places] for row in members)
            num_spared += (len(members) - 1) * num_shared
        assert rows.num_spared == num_spared
        self.num_spared += num_spared
        self.num_rows += len(rows)


@pytest.mark.medium
@pytest.mark.parametrize("seed", range(8))
def test_rows_that_share_a_prefix_begin_with_the_same_blocks_at_every_step(seed: int) -> None:
    rng, house = random.Random(seed), SharingHouse(num_blocks=(45, 100)[seed % 2], level=4)
    texts, taken = [list(range(base, base + 30)) for base in (0, 200, 400)], list[BlocksFreed]()
    for number in range(400):
        house.is_mute, house.is_busy = rng.random() < 0.1, rng.random() < 0.2
        act(house, rng, number, texts, taken)
        if rng.random() < 0.1 and len(house.local) < MOST_PROMPTS:  # several texts of one prompt
            text = [*rng.choice(texts), number]
            for choice in "abc":
                house.ask(f"r{number}{choice}", text, rng.randint(4, 30))
        if rng.random() < 0.05 and house.scheduler.active:
            house.scheduler.end(rng.choice(list(house.scheduler.active.values())))
        house.seen += house.turn()
        over = [[*sequence.token_ids] for sequence in house.seen if sequence.ended]
        texts = [text for text in [*texts[:3], *over[-8:]] if len(text) < 90]
        house.now_s += rng.random() / 4
        if rng.random() < 0.5:
            house.decode()
    assert house.num_spared > 2 * house.num_rows, "hardly any prefix was shared"
    assert house.num_preempted or seed % 2


def sequences(*tables: list[int]) -> list[DecodeSequence]:
    """Of so many full blocks, and a token."""
    return [
        decode_sequence(str(number), [1] * (len(table) * 16 + 1), 1, SamplingParams(), one_table(table, 16))
        for number, table in enumerate(tables)
    ]


def test_who_goes_on_sharing_keeps_the_number_and_who_begins_gets_a_free_one() -> None:
    rows, now_s = Rows(), [0.0]
    sharing = PrefixSharing(tiny(16).groups[0], clock=lambda: now_s[0])
    one, two = list(range(100, 120)), list(range(200, 216))
    several = sequences(one, one, two, two, [*one, 1], [*two[:15], 2, 3])
    for sequence in several[2:4]:
        rows.enter(sequence)
    sharing.regroup(rows)
    assert list(rows.prefixes.values()) == [SharedPrefix(0, MIN_TOKENS)] * 2
    for sequence in several[:2] + several[4:]:
        rows.enter(sequence)
    sharing.regroup(rows)
    assert [rows.prefixes.get(sequence, UNSHARED) for sequence in several] == [
        *[SharedPrefix(1, 320)] * 2,
        *[SharedPrefix(0, MIN_TOKENS)] * 2,
        SharedPrefix(1, 320),
        UNSHARED,  # 15 blocks are too few
    ]


def test_groups_that_part_have_numbers_of_their_own() -> None:
    rows = Rows()
    sharing = PrefixSharing(tiny(16).groups[0], clock=lambda: 0.0)
    system, documents = list(range(16)), [list(range(base, base + 5)) for base in (100, 200)]
    readers = sequences(*[[*system, *document] for document in documents * 3])
    for sequence in readers[:4]:
        rows.enter(sequence)
    sharing.regroup(rows)
    assert set(rows.prefixes.values()) == {SharedPrefix(0, 256)}
    for sequence in readers[4:]:
        rows.enter(sequence)
    sharing.regroup(rows)
    assert [rows.prefixes[sequence] for sequence in readers] == [SharedPrefix(0, 336), SharedPrefix(1, 336)] * 3


def test_a_block_that_is_not_written_to_its_end_is_not_shared() -> None:
    rows = Rows()
    for sequence in sequences(*[list(range(20))] * 2):
        sequence.token_ids.pop()  # so that the next step writes the last place of its last block
        rows.enter(sequence)
    PrefixSharing(tiny(16).groups[0]).regroup(rows)
    assert {prefix.num_tokens for prefix in rows.prefixes.values()} == {19 * 16}


def test_grouping_rests_for_as_long_as_it_is_to_take_little_of_the_time() -> None:
    rows, now_s = Rows(), [0.0]

    def clock() -> float:
        now_s[0] += 1.0
        return now_s[0]

    sharing = PrefixSharing(tiny(16).groups[0], clock=clock)
    first, second, third = sequences(*[list(range(20))] * 3)
    for sequence in (first, second):
        rows.enter(sequence)
    sharing.regroup(rows)
    assert set(rows.prefixes) == {first, second}
    rows.enter(third)
    sharing.regroup(rows)
    assert set(rows.prefixes) == {first, second}
    now_s[0] += REST
    sharing.regroup(rows)
    assert set(rows.prefixes) == {first, second, third}


def test_who_is_back_before_rows_are_grouped_again_shares_once_more() -> None:
    """So that the same rows are there as when they were grouped last."""
    rows, now_s = Rows(), [0.0]

    def clock() -> float:
        now_s[0] += 1.0
        return now_s[0]

    sharing = PrefixSharing(tiny(16).groups[0], clock=clock)
    first, second = sequences(*[list(range(20))] * 2)
    for sequence in (first, second):
        rows.enter(sequence)
    for rests in (False, True, False):
        sharing.regroup(rows)
        rows.take_changes()
        assert (second in rows.prefixes) != rests
        if rests:
            rows.enter(second)
            sharing.regroup(rows)
            now_s[0] += REST
        else:
            rows.leave(second)
    assert rows.num_spared == 320


def test_tables_are_compared_only_where_another_begins_alike() -> None:
    rows, compared = Rows(), list[DecodeSequence]()

    class Noting(PrefixSharing):
        def _lasting_blocks(self, sequence: DecodeSequence) -> bytes:
            compared.append(sequence)
            return super()._lasting_blocks(sequence)

    one, two, three = (list(range(base, base + 20)) for base in (100, 200, 300))
    several = sequences(one, two, [*one[:16], *three], [*two[:15], 1, 2], three, [])
    for sequence in several:
        rows.enter(sequence)
    Noting(tiny(16).groups[0]).regroup(rows)
    assert compared == [several[0], several[2]] and set(compared) == set(rows.prefixes)


def test_blocks_that_a_window_uses_again_are_not_shared() -> None:
    rows = Rows()
    for sequence in sequences(*[list(range(20))] * 2):
        rows.enter(sequence)
    PrefixSharing(window(16, 400)).regroup(rows)
    assert not rows.prefixes
