"""Which steps read shared prefixes once, and when graphs for that are captured; the steps themselves are left out."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from common.device.engine.engine import Engine
from common.device.engine.step_rules import MIN_SPARED_BYTES
from common.kernels.attention.shared_parts import MAX_SHARING_ROWS
from decode_worker.batch.batch import DecodeBatch
from decode_worker.batch.runner import CAPTURE_BYTES, DecodeRunner, StepKind

FEW_ROWS = 4
ENOUGH = MIN_SPARED_BYTES
ALONE, SHARING = StepKind(4), StepKind(4, shares_prefixes=True)


class NotingRunner(DecodeRunner):
    """Steps are noted: those that run kernel by kernel as `run`, replays as `replayed`."""

    def __init__(
        self,
        *,
        max_rows: int = FEW_ROWS,
        ops_can: bool = True,
        share_prefixes: bool = True,
        use_graphs: bool = True,
    ) -> None:
        engine = SimpleNamespace(
            device=torch.device("cpu"), graph_safe=True, step_ops=SimpleNamespace(shares_prefixes=ops_can)
        )
        batch = SimpleNamespace(words=SimpleNamespace(launched=lambda: None))
        super().__init__(
            cast(Engine, engine),
            cast(DecodeBatch, batch),
            max_rows,
            use_graphs=use_graphs,
            share_prefixes=share_prefixes,
        )
        self.run: list[StepKind] = []
        self.replayed: list[StepKind] = []

    def _step(self, kind: StepKind) -> None:
        self.run.append(kind)

    def _captured(self, kind: StepKind) -> Any:
        return SimpleNamespace(replay=lambda: self.replayed.append(kind))


@pytest.mark.parametrize("use_graphs", [False, True])
def test_a_step_shares_if_it_may_and_spares_enough_and_nobody_asks_for_log_probabilities(use_graphs: bool) -> None:
    runner = NotingRunner(use_graphs=use_graphs)
    runner.graphs[SHARING] = runner._captured(SHARING)
    for spared_bytes in (0, ENOUGH - 1, ENOUGH):
        runner.launch(3, spared_bytes=spared_bytes)
    runner.launch(3, has_logprobs=True, spared_bytes=ENOUGH)
    assert runner.spared_bytes == ENOUGH
    steps = [*runner.run, *runner.replayed]
    assert steps.count(SHARING) == 1 and StepKind(4, has_logprobs=True) in steps
    for may_not in (NotingRunner(ops_can=False), NotingRunner(share_prefixes=False)):
        may_not.launch(4, spared_bytes=2 * CAPTURE_BYTES)
        for _ in range(3):
            may_not.capture_ahead()
        assert may_not.run == [ALONE, StepKind(2), StepKind(1), StepKind(1, has_logprobs=True)]


@pytest.mark.parametrize(
    ("num_rows", "may"), [(1, False), (2, True), (MAX_SHARING_ROWS, True), (MAX_SHARING_ROWS + 1, False)]
)
def test_steps_of_more_rows_than_are_told_apart_do_not_share(num_rows: int, may: bool) -> None:
    runner = NotingRunner(max_rows=num_rows)
    runner.launch(num_rows, spared_bytes=CAPTURE_BYTES)
    assert runner.run == [StepKind(num_rows, shares_prefixes=may)]
    assert (StepKind(num_rows, shares_prefixes=True) in runner._sharing_kinds()) == may


def test_a_graph_is_captured_under_load_once_it_would_have_paid() -> None:
    runner, num_without = NotingRunner(), 8
    for _ in range(num_without + 1):
        runner.launch(4, spared_bytes=CAPTURE_BYTES // num_without)
    runner.launch(4, spared_bytes=ENOUGH)
    runner.launch(4)
    assert runner.run == [ALONE, SHARING]
    assert runner.replayed == [*[ALONE] * (num_without - 2), SHARING, SHARING, ALONE]


def test_a_worker_that_is_idle_captures_all_kinds_and_first_those_that_share() -> None:
    runner = NotingRunner()
    runner.run_sizes(runner.first_sizes)
    runner.run.clear()
    for _ in range(10):
        runner.capture_ahead()
    assert runner.run == [
        *(StepKind(rows, shares_prefixes=True) for rows in (2, 4)),
        *(StepKind(rows, has_logprobs=True) for rows in (1, 2, 4)),
    ]


def test_steps_replay_the_next_larger_graph_until_an_idle_worker_has_captured_their_own() -> None:
    runner = NotingRunner(max_rows=100, ops_can=False)
    runner.run_sizes(runner.first_sizes)
    assert [kind.num_rows for kind in runner.run] == [100, 64, 32, 16, 8, 4, 2, 1]
    runner.run.clear()

    def replayed(num_rows: int) -> int:
        runner.replayed.clear()
        runner.launch(num_rows)
        [kind] = runner.replayed
        assert kind == StepKind(kind.num_rows)
        return kind.num_rows

    sizes = range(1, 101)
    larger = {rows: replayed(rows) for rows in sizes}
    assert all(rows <= larger[rows] < max(2, 2 * rows) for rows in sizes)
    assert runner.run == [], "no stream waits for a capture"
    assert (replayed(17), replayed(40), replayed(65)) == (32, 64, 100)
    runner.launch(3, has_logprobs=True)  # has graphs of its own, which no other step replays
    assert (replayed(3), runner.run) == (4, [StepKind(4, has_logprobs=True)])
    for _ in runner.buckets:
        runner.capture_ahead()
    assert {rows: replayed(rows) for rows in sizes} == {
        rows: next(size for size in runner.buckets if size >= rows) for rows in sizes
    }


def test_without_graphs_every_size_is_run_before_the_first_request() -> None:
    runner = NotingRunner(max_rows=100, use_graphs=False)
    runner.run_sizes(runner.first_sizes)
    assert runner.run == [StepKind(rows) for rows in reversed(runner.buckets)]
    runner.launch(17)
    assert runner.run[-1] == StepKind(24)
