import random

import pytest

from common.wire.values.sampling_params import SamplingParams
from decode_worker.sequences.rows import Clear, Fill, Grow
from decode_worker.sequences.scheduler import DecodeScheduler
from decode_worker.sequences.sequence import DecodeSequence
from tests.decode_worker.bench import reserved
from tests.support.allocator import check_owned
from tests.support.layouts import allocator_of, one_table
from tests.support.sequences import blocks_of_rows, decode_sequence

BLOCK_SIZE = 4


def make(num_blocks: int = 50, max_num_seqs: int = 8) -> DecodeScheduler:
    return DecodeScheduler(allocator_of(num_blocks, BLOCK_SIZE), max_num_seqs, max_len=1000)


def arrive(scheduler: DecodeScheduler, name: str, num_tokens: int = 6, max_tokens: int = 10) -> DecodeSequence:
    sequence = decode_sequence(name, list(range(num_tokens)), 1, SamplingParams(max_tokens=max_tokens))
    scheduler.reserve(sequence, one_table([], BLOCK_SIZE))
    scheduler.activate(sequence)
    return sequence


def step(scheduler: DecodeScheduler) -> list[DecodeSequence]:
    scheduler.slots.make()
    return scheduler.launched()


def collect(scheduler: DecodeScheduler, sequences: list[DecodeSequence]) -> None:
    for sequence in sequences:
        if not sequence.ended:
            sequence.token_ids.append(0)
            sequence.num_outputs += 1
            if sequence.num_outputs == sequence.sampling.max_tokens:
                scheduler.end(sequence)
    scheduler.collected(sequences)


def test_rows_stay_dense_and_the_changes_say_how() -> None:
    scheduler = make()
    a, b, c = (arrive(scheduler, name) for name in "abc")
    assert scheduler.rows.take_changes() == [Fill(0, a), Fill(1, b), Fill(2, c)]
    scheduler.end(a)
    assert [s.request.request_id for s in scheduler.rows.sequences] == ["c", "b"]
    assert scheduler.rows.take_changes() == [Fill(0, c, source=2), Clear(2)]
    scheduler.end(b)
    assert scheduler.rows.take_changes() == [Clear(1)]
    assert (c.row, b.row) == (0, -1)


def test_who_came_and_went_between_two_steps_leaves_no_trace() -> None:
    scheduler = make()
    a, b = arrive(scheduler, "a"), arrive(scheduler, "b")
    scheduler.rows.take_changes()
    c = arrive(scheduler, "c")
    scheduler.rows.grown(c, 0, 2, 9)
    scheduler.end(c)
    assert scheduler.rows.take_changes() == []
    scheduler.end(a)
    d = arrive(scheduler, "d")
    assert scheduler.rows.take_changes() == [Fill(0, b, source=1), Fill(1, d)]


def test_tables_grow_by_a_block_when_the_next_token_needs_one() -> None:
    scheduler = make()
    a = arrive(scheduler, "a", num_tokens=7)
    scheduler.rows.take_changes()
    step(scheduler)
    assert len(a.tables[0].block_ids) == 2
    assert scheduler.rows.take_changes() == []
    step(scheduler)
    assert scheduler.rows.take_changes() == [], "the eighth token still has a slot"
    step(scheduler)
    assert scheduler.rows.take_changes() == [Grow(0, 0, 2, a.tables[0].block_ids[2])]


def test_nothing_is_scheduled_past_max_tokens() -> None:
    scheduler = make()
    arrive(scheduler, "a", max_tokens=3)
    first, second = step(scheduler), step(scheduler)
    assert [len(first), len(second)] == [1, 1]
    assert step(scheduler) == []
    collect(scheduler, first)
    assert scheduler.active, "its last token is in flight"
    collect(scheduler, second)
    assert not scheduler.active
    check_owned(scheduler.allocator, [])


def test_blocks_linger_while_a_step_in_flight_touches_them() -> None:
    scheduler = make()
    a = arrive(scheduler, "a")
    first, second = step(scheduler), step(scheduler)
    scheduler.end(a)
    scheduler.collected(first)
    assert a.tables, "the second step still writes there"
    scheduler.collected(second)
    check_owned(scheduler.allocator, [])


def test_who_gets_no_block_sits_out_and_the_others_go_on() -> None:
    scheduler = make(num_blocks=5)
    a, b = arrive(scheduler, "a", num_tokens=8), arrive(scheduler, "b", num_tokens=8)
    first = step(scheduler)
    assert first == [a, b]
    second = step(scheduler)
    assert second == [a], "there was one block for the two"
    assert not scheduler.slots.is_starved(scheduler.lingering), "the step in flight may end somebody"
    collect(scheduler, first)
    assert step(scheduler) == [a]
    assert scheduler.slots.is_starved(scheduler.lingering)
    scheduler.end(a)
    assert not scheduler.slots.is_starved(scheduler.lingering), "its blocks come free with the steps in flight"
    assert step(scheduler) == []
    collect(scheduler, second)
    collect(scheduler, [a])
    assert step(scheduler) == [b]
    assert scheduler.rows.take_changes()[0] == Fill(0, b), "its last token is the host's"
    check_owned(scheduler.allocator, [b.tables[0].block_ids])


def test_the_youngest_goes_when_no_block_comes_free() -> None:
    scheduler = make(num_blocks=4)
    a, b = arrive(scheduler, "a", num_tokens=8), arrive(scheduler, "b", num_tokens=8)
    collect(scheduler, step(scheduler))
    assert step(scheduler) == [] and scheduler.slots.is_starved(scheduler.lingering)
    assert scheduler.preempt() is b and b.ended
    assert step(scheduler) == [a]
    check_owned(scheduler.allocator, [a.tables[0].block_ids])


def test_the_longest_rest_ends_first() -> None:
    scheduler = make(num_blocks=5)
    a, b, c = (arrive(scheduler, name, num_tokens=size) for name, size in (("a", 7), ("b", 8), ("c", 4)))
    for _ in range(2):
        collect(scheduler, step(scheduler))
    assert scheduler.slots.resting == [b, c] and scheduler.rows.sequences == [a]
    scheduler.slots.make()
    assert scheduler.slots.resting == [b, c, a]
    scheduler.end(c)
    assert step(scheduler) == [b]
    assert scheduler.slots.resting == [a]


def test_admission_leaves_every_sequence_a_block_to_grow() -> None:
    scheduler = make(num_blocks=6)
    assert scheduler.capacity.has_room(24)
    arrive(scheduler, "a", num_tokens=8)
    assert scheduler.capacity.has_room(12)
    assert not scheduler.capacity.has_room(13)


@pytest.mark.parametrize(("num_blocks", "max_len"), [(6, 1000), (100, 24)])
def test_a_sequence_is_decoded_only_where_all_of_it_will_have_room(num_blocks: int, max_len: int) -> None:
    scheduler = DecodeScheduler(allocator_of(num_blocks, BLOCK_SIZE), 8, max_len)
    fits, too_long = (decode_sequence("a", [0] * 15, 1, SamplingParams(max_tokens=n)) for n in (10, 11))
    assert scheduler.capacity.objection(fits) == ""
    assert "25 tokens" in scheduler.capacity.objection(too_long) and "at most 24" in scheduler.capacity.objection(
        too_long
    )


def test_rows_are_limited_by_reserved_sequences_too() -> None:
    scheduler = make(max_num_seqs=2)
    arrive(scheduler, "a")
    waiting = decode_sequence("b", [1], 1, SamplingParams())
    assert reserved(scheduler, waiting)
    assert not scheduler.capacity.has_room(1)
    scheduler.unreserve(waiting)
    assert scheduler.capacity.has_room(1)


@pytest.mark.parametrize("seed", range(30))
def test_the_changes_replayed_on_a_table_gives_the_rows_and_no_block_is_lost(seed: int) -> None:
    rng, scheduler = random.Random(seed), make(num_blocks=30)
    table: dict[int, tuple[str, list[int]]] = {}
    in_flight: list[DecodeSequence] = []
    for i in range(200):
        if rng.random() < 0.5 and scheduler.capacity.has_room(6):
            arrive(scheduler, f"r{i}", rng.randint(1, 6), rng.randint(2, 12))
        if rng.random() < 0.1 and scheduler.active:
            scheduler.end(rng.choice(list(scheduler.active.values())))
        scheduler.slots.make()
        while scheduler.slots.is_starved(scheduler.lingering):
            scheduler.preempt()
            scheduler.slots.make()
        replay(scheduler, table)
        expected = {s.row: (s.request.request_id, s.tables[0].block_ids.tolist()) for s in scheduler.rows.sequences}
        assert {row: (name, ids) for row, (name, ids) in table.items()} == expected
        launched = scheduler.launched()
        collect(scheduler, in_flight)
        in_flight = launched
        check_owned(scheduler.allocator, blocks_of_rows(scheduler))
    collect(scheduler, in_flight)


def replay(scheduler: DecodeScheduler, table: dict[int, tuple[str, list[int]]]) -> None:
    before = dict(table)
    for change in scheduler.rows.take_changes():
        match change:
            case Fill(row, sequence, source):
                assert source < 0 or before[source][0] == sequence.request.request_id
                table[row] = (sequence.request.request_id, list(sequence.tables[0].block_ids))
            case Clear(row):
                del table[row]
            case Grow(row, 0, index, block_id):
                name, block_ids = table[row]
                table[row] = (name, [*block_ids[:index], block_id])
