"""Steps beside others: which cells there are, what their rows say, and that no cell holds up the rest."""

import io
import json
import sys
import threading
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest

from benchmarks.decode_step import MORE_TOKENS
from benchmarks.own_memory import own_memory
from benchmarks.sharing import pair
from benchmarks.sharing.grid import Cell, Kind, Times, figures, grid, rows_of
from benchmarks.sharing.pair import Bench, Pair
from benchmarks.sharing.side import SIDES, Asked, DecodeSide, Page, all_the_time, in_turns, serve
from tests.support.guided import DEMO_MODEL

FAKE_SIDE = """
import json, sys, time

def answer(**said):
    print(json.dumps(said), flush=True)

answer(ready=True)
for line in sys.stdin:
    cell = json.loads(line)
    if cell["tokens"] == 13:
        sys.exit(3)
    if cell["tokens"] == 14:
        answer(error="CUDA error")
        continue
    answer(ready=cell["tokens"] != 11)
    if cell["tokens"] == 11:
        continue
    sys.stdin.readline()
    if cell["tokens"] == 12:
        time.sleep(600)
    answer(ms=[cell["rows"] + 0.5] * (2 if cell["tokens"] == 15 else 3))
"""


def test_cells_that_others_are_compared_with_come_first_and_every_pair_is_there() -> None:
    cells = grid([8, 64], [512, 8192], [0, 12])
    assert cells[:6] == [Cell(8, 0), Cell(64, 0), Cell(0, 512), Cell(0, 8192), Cell(0, 512, 12), Cell(0, 8192, 12)]
    assert cells[6:11] == [
        *(Cell(rows, tokens, kind=Kind.TURNS) for rows in (8, 64) for tokens in (512, 8192)),
        Cell(0, 512, 12, Kind.SWITCH),
    ]
    assert set(cells[11:]) == {Cell(r, t, left) for r in (8, 64) for t in (512, 8192) for left in (0, 12)}
    assert len({cell.workload for cell in cells}) == len(cells) == 19


def test_rows_have_the_steps_beside_those_alone_and_what_turns_and_switches_cost() -> None:
    measured = {
        Cell(64, 0): Times(decode=[5.0, 5.0, 7.0]),
        Cell(0, 2048): Times(prompt=[25.0]),
        Cell(0, 2048, 12): Times(prompt=[27.0]),
        Cell(64, 2048, 12): Times([10.0, 11.0, 30.0], [36.0]),
        Cell(64, 2048, kind=Kind.TURNS): Times([31.0], [31.0]),
        Cell(0, 2048, 12, Kind.SWITCH): Times(prompt=[26.0, 26.5]),
        Cell(8, 2048, kind=Kind.TURNS): Times([28.0], [28.0]),
    }
    rows = {(row.workload, row.figure): row for row in rows_of("a GPU", "a model", measured)}
    beside = "sharing, 64 rows of 1024 beside prompt steps of 2048 tokens, 12 multiprocessors left"
    told = rows[beside, "decode_step_p50"]
    assert (told.value, told.unit, told.compared_with, told.compared_value) == (11.0, "ms", "alone", 5.0)
    assert rows[beside, "decode_step_p99"].compared_value == pytest.approx(6.96), "the same of those alone"
    assert (rows[beside, "prompt_step_p50"].value, rows[beside, "prompt_step_p50"].compared_value) == (36.0, 27.0)
    assert rows["sharing, 64 rows of 1024 alone", "decode_step_p50"].compared_with == ""
    turns, switch = Cell(64, 2048, kind=Kind.TURNS).workload, Cell(0, 2048, 12, Kind.SWITCH).workload
    assert (rows[turns, "turn"].value, rows[turns, "turn_cost"].value) == (31.0, 1.0)
    assert rows[switch, "switch_cost"].value == 0.25
    lone = Cell(8, 2048, kind=Kind.TURNS)
    assert [figure.name for figure, _ in figures(lone, measured[lone], measured)] == ["turn"], "8 rows were not alone"


def test_a_cell_that_fails_or_hangs_costs_itself_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair, "CELL_S", 2.0)
    monkeypatch.setattr(pair, "END_S", 0.1)
    command, begun = [sys.executable, "-c", FAKE_SIDE], count()

    def begin() -> Pair:
        next(begun)
        return Pair(dict.fromkeys(SIDES, command), {name: {} for name in SIDES}, tmp_path / "page")

    cells = [Cell(1, 10), *(Cell(2, tokens) for tokens in (11, 12, 13, 14, 15)), Cell(3, 0), Cell(4, 10)]
    bench = Bench(begin, time.monotonic() + 500.0, linger_s=0.0)
    bench.run(cells)
    one, three, four = ([number + 0.5] * 3 for number in (1, 3, 4))
    assert bench.measured == {Cell(1, 10): Times(one, one), Cell(3, 0): Times(three), Cell(4, 10): Times(four, four)}
    assert [(cell.num_tokens, problem) for cell, problem in bench.problems.items()] == [
        (11, "does not fit"),
        (12, f"no answer within {2.25 + Cell(2, 12).window_s:g} s"),
        (13, "its process ended with status 3"),
        (14, "CUDA error"),
        (15, "fewer than 3 steps in 0.5 s"),
    ]
    assert next(begun) == 4, "after each failure both processes begin anew"


def test_what_there_is_no_time_for_is_said(tmp_path: Path) -> None:
    def begin() -> Pair:
        raise AssertionError

    bench = Bench(begin, time.monotonic() - 1.0)
    bench.run([Cell(1, 10)])
    assert (bench.measured, bench.problems) == ({}, {Cell(1, 10): "the time was over"})


def test_two_steps_are_in_flight_and_only_the_window_counts() -> None:
    now_s, launched, waited = [0.0], count(), list[int]()

    def launch() -> Callable[[], None]:
        number = next(launched)

        def wait() -> None:
            waited.append(number)
            now_s[0] += 1.0

        return wait

    assert all_the_time(launch, 3.0, 6.0, lambda: now_s[0]) == [1000.0] * 2
    assert (waited, next(launched)) == ([*range(8)], 8)


def test_sides_run_one_after_the_other_in_turns(tmp_path: Path) -> None:
    path, log = tmp_path / "page", list[int]()
    path.write_bytes(b"\0")
    begin_s = time.monotonic()

    def run(turn: int) -> None:
        in_turns(lambda: lambda: log.append(turn), begin_s, begin_s + 0.3, Page(path), turn)

    threads = [threading.Thread(target=run, args=(turn,)) for turn in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert log == [i % 2 for i in range(len(log))] and log


@pytest.mark.medium
def test_rows_return_to_their_contexts_before_they_outgrow_their_blocks() -> None:
    with own_memory("cpu") as memory:
        side = DecodeSide(str(DEMO_MODEL), "cpu", Asked([2], [32], 16), memory)
        launch, state = side.prepare(Cell(2, 0, context=16)), side.bench.batch.state
        assert launch is not None
        first, lengths = state.seq_lens[0].item(), list[float]()
        for _ in range(2 * MORE_TOKENS):
            launch()()
            lengths.append(state.seq_lens[0].item() - first)
    assert max(lengths) < MORE_TOKENS and lengths.count(1) == 3


@pytest.mark.medium
@pytest.mark.parametrize("name", SIDES)
def test_a_side_runs_the_steps_of_its_worker(name: str, tmp_path: Path) -> None:
    page, answers = tmp_path / "page", io.StringIO()
    page.write_bytes(b"\0")
    cells = [{"rows": 2, "tokens": 32, "left": 12, "kind": kind.value, "context": 16} for kind in Kind]
    window = {"begin_s": 0.0, "end_s": time.monotonic() + 1.0}
    too_long = {**cells[0], "rows": 3, "tokens": 1 << 20, "context": 1 << 20}
    asked = io.StringIO("\n".join(json.dumps(each) for each in (cells[0], window, cells[2], window, too_long)))
    with own_memory("cpu") as memory:
        asked_for = Asked([2], [32, 64], 16)
        serve(SIDES[name](str(DEMO_MODEL), "cpu", asked_for, memory), Page(page), asked, answers)
    ready, beside, times, again, more, unfit = map(json.loads, answers.getvalue().splitlines())
    assert ready == beside == again == {"ready": True} and unfit == {"ready": False}
    assert all(ms > 0 for ms in (*times["ms"], *more["ms"]))
