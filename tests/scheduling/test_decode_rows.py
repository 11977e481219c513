"""Rows are shared: by priority, then between clients, whatever one of them sends."""

import random

import pytest

from decode_worker.admission import PATIENCE_S
from tests.scheduling.decode_rows import STEP_S, RowsSimulation, Stream


@pytest.mark.medium
def test_a_stream_is_silent_for_no_longer_than_the_patience_beside_the_flood_of_another_client() -> None:
    simulation = RowsSimulation(num_rows=16, num_blocks=4000)
    flood = [Stream(0.0, 400, client=1) for _ in range(80)]
    stream = Stream(0.5, 40, client=2)
    simulation.run([*flood, stream])
    assert stream.longest_gap_s <= PATIENCE_S + 2 * STEP_S
    assert len(stream.token_times_s) == 40 and all(len(each.token_times_s) == 400 for each in flood)
    assert simulation.num_pauses == 1


def test_a_stream_of_better_priority_never_waits_for_worse_ones_and_they_go_on_where_they_were() -> None:
    simulation = RowsSimulation(num_rows=16, num_blocks=4000)
    flood = [Stream(0.0, 300, client=1, priority=10) for _ in range(40)]
    urgent = [Stream(0.5 + 0.001 * i, 30, client=1) for i in range(20)]
    simulation.run([*flood, *urgent])
    in_time = sorted(urgent, key=lambda stream: stream.longest_gap_s)
    assert in_time[15].longest_gap_s <= 2 * STEP_S, "sixteen of them have a row at once"
    assert in_time[-1].longest_gap_s <= 32 * STEP_S, "the others as soon as one of them has ended"
    assert not any(stream.num_failures for stream in flood), "they keep their blocks"


def test_two_clients_that_flood_come_to_have_as_many_rows() -> None:
    simulation = RowsSimulation(num_rows=16, num_blocks=8000)
    first = [Stream(0.0, 500, client=1) for _ in range(40)]
    second = [Stream(0.5, 500, client=2) for _ in range(40)]
    for stream in first:
        simulation.hand_over(stream)
    while simulation.now_s < 4.0:
        if simulation.now_s >= 0.5 and second:
            for stream in second:
                simulation.hand_over(stream)
            second = []
        simulation.step()
        simulation.check()
        simulation.now_s += STEP_S
    assert simulation.scheduler.capacity.num_rows_of == {1: 8, 2: 8}


def test_worse_priority_gives_up_its_blocks_when_there_are_no_others() -> None:
    simulation = RowsSimulation(num_rows=8, num_blocks=17)
    low = [Stream(0.0, 40, client=1, priority=5) for _ in range(2)]
    urgent = Stream(0.3, 12, client=2)
    simulation.shared.leases.is_lost = True  # no blocks come but those at hand
    simulation.run([*low, urgent])
    assert urgent.num_failures == 0 and urgent.longest_gap_s <= 3 * STEP_S
    assert [stream.num_failures for stream in low] == [0, 1], "the one that was admitted last"
    assert all(len(stream.token_times_s) == 40 for stream in low)


@pytest.mark.medium
@pytest.mark.parametrize("seed", range(6))
def test_whatever_comes_every_stream_ends_and_no_client_waits_beside_one_with_more_rows(seed: int) -> None:
    rng = random.Random(seed)
    simulation = RowsSimulation(num_rows=8, num_blocks=rng.choice([300, 4000]))
    streams = [
        Stream(
            rng.random() * 5, rng.randint(1, 200), client=rng.choice([1, 1, 1, 2, 3]), priority=rng.choice([0, 0, 1])
        )
        for _ in range(60)
    ]
    simulation.run(streams)
    assert all(len(stream.token_times_s) == stream.num_tokens for stream in streams)
