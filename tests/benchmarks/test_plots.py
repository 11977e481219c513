"""Which rows a plot shows, and that it is drawn, small, and the same each time. Figures here are made up."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.plot_data import MissingRows, beside, mps_caps, scaling, step_times
from deploy.bench.origin import ROOT
from deploy.bench.results import Row, append_rows

ROW = Row("2026-01-02", "abc", "NVIDIA H200", "", "baton", "qwen3-4b", "", "", 1, "ms", command="python x")
PLOTS = ROOT / "benchmarks" / "plots"
MAX_SVG_BYTES = 60_000
Main = Callable[[list[str]], int]


@pytest.fixture
def main() -> Main:
    pytest.importorskip("matplotlib", reason="the bench extra is not installed")
    from benchmarks.plots import main

    return main


def step_rows() -> list[Row]:
    batches = [(batch, context) for context in (128, 1024, 4096, 32_768) for batch in (1, 4, 16, 64, 256)]
    return [
        replace(
            ROW,
            workload=f"decode step alone, {batch} sequences at {context} tokens",
            figure="step",
            value=float(f"{2.2 + batch * context / 4e4 + batch / 60:.4g}"),
            compared_with="read floor",
            compared_value=float(f"{1.8 + batch * context / 4.5e4:.4g}"),
        )
        for batch, context in batches
        if batch * context < 1e6
    ]


def mps_rows() -> list[Row]:
    return [
        replace(
            ROW, system=f"baton, MPS {cap} %", workload=f"{rate} req/s, 1024/128, 200 requests",
            figure=figure, value=float(f"{scale * (60 / cap + rate / 16 + cap / 90):.4g}"),
        )
        for cap in (40, 60, 80, 100) for rate in (16, 32) for figure, scale in (("ttft_p50", 18), ("itl_p99", 5))
    ]  # fmt: skip


def worker_rows() -> list[Row]:
    row = replace(
        ROW, hardware="4 x NVIDIA H200", figure="output_throughput", workload="at once, 1024/128, 512 requests"
    )
    values = {"2P2D": 16100, "1P1D": 8275, "3P1D": 9100.5, "1P2D": 9061}
    return [replace(row, system=f"baton {workers}", value=value) for workers, value in values.items()]


def beside_rows() -> list[Row]:
    row = replace(ROW, compared_with="vllm 1.2")
    return [
        replace(row, workload=f"{load}, 16 requests", figure=figure, value=value, compared_value=other)
        for load in ("16 req/s, 1024/128", "concurrency 1, 128/256", "at once, 1024/128")
        for figure, value, other in (
            ("ttft_p50", 6, 18.5), ("tpot_p50", 2.5, 3.4), ("itl_p99", 5, 40),
            ("output_throughput", 1905, 1891),
        )
    ]  # fmt: skip


def all_rows() -> list[Row]:
    return [*step_rows(), *mps_rows(), *worker_rows(), *beside_rows()]


def test_steps_are_ordered_by_batch_and_the_last_measurement_counts() -> None:
    again = replace(step_rows()[0], value=9.5)
    points = step_times([*reversed(step_rows()), again]).by_context[128]
    assert [batch for batch, _, _ in points] == [1, 4, 16, 64, 256]
    assert points[0][1] == 9.5
    too_few = [replace(row, workload=row.workload.replace(" 128 ", " 99 ")) for row in step_rows()[:2]]
    assert list(step_times([*too_few, *step_rows()]).by_context) == [128, 1024, 4096, 32_768]


def test_other_models_and_gpus_are_no_part_of_a_plot() -> None:
    others = [("qwen3-4b in int4", "NVIDIA H200"), ("qwen3-4b", "NVIDIA H100 80GB HBM3")]
    for model, hardware in others:
        strangers = [replace(row, value=77, model=model, hardware=hardware) for row in step_rows()]
        assert step_times([*step_rows(), *strangers]) == step_times(step_rows())
    newer = [replace(row, model="qwen3.5-4b", value=77) for row in beside_rows()]
    assert beside([*beside_rows(), *newer]) == beside(beside_rows())


def test_caps_by_load() -> None:
    data = mps_caps([*mps_rows(), replace(mps_rows()[0], system="baton, no MPS")])
    assert data.caps == [40, 60, 80, 100]
    assert list(data.panels["TTFT p50"]) == ["16 req/s", "32 req/s"]
    assert data.panels["ITL p99"]["16 req/s"][0] == (40, 14.72)


def test_workers_are_ordered_and_other_machines_left_out() -> None:
    other = replace(worker_rows()[0], hardware="2 x NVIDIA H200", value=1)
    assert scaling([*worker_rows(), other]).values == {(1, 1): 8275, (1, 2): 9061, (2, 2): 16100, (3, 1): 9100.5}
    assert list(scaling(worker_rows()).values) == [(1, 1), (1, 2), (2, 2), (3, 1)]


def test_one_run_of_both_systems_wins_over_two_runs() -> None:
    alone = [replace(row, compared_with="", compared_value=math.nan, value=77) for row in beside_rows()]
    data = beside([*beside_rows(), *alone])
    assert data.workloads == ["concurrency 1, 128/256", "16 req/s, 1024/128", "at once, 1024/128"]
    assert data.value("16 req/s, 1024/128", "baton", "ttft_p50") == 6
    assert data.value("16 req/s, 1024/128", "vllm 1.2", "ttft_p50") == 18.5
    assert data.value("at once, 1024/128", "baton", "ttft_p50") is None  # would be the queue
    assert data.value("at once, 1024/128", "vllm 1.2", "output_throughput") == 1891


def test_two_runs_are_shown_where_there_is_no_common_one() -> None:
    common, lone = beside_rows()[:4], beside_rows()[-1]
    ours = replace(lone, compared_with="", compared_value=math.nan)
    theirs = replace(ours, system="vllm 1.2", value=1700)
    assert beside([*common, ours, theirs]).value("at once, 1024/128", "vllm 1.2", "output_throughput") == 1700
    assert beside([*common, ours]).workloads == ["16 req/s, 1024/128"]


@pytest.mark.parametrize("select", [step_times, mps_caps, scaling, beside])
def test_missing_rows_are_named(select: object) -> None:
    assert callable(select)
    with pytest.raises(MissingRows, match="no "):
        select([ROW])


@pytest.mark.medium
def test_plots_are_small_and_the_same_each_time(main: Main, tmp_path: Path) -> None:
    append_rows(tmp_path / "results.csv", all_rows())
    for out in ("first", "second"):
        assert main(["--results", str(tmp_path / "results.csv"), "--out", str(tmp_path / out)]) == 0
    plots = sorted((tmp_path / "first").iterdir())
    assert [plot.name for plot in plots] == ["beside_vllm.svg", "decode_step.svg", "mps_cap.svg", "workers.svg"]
    for plot in plots:
        drawn = plot.read_bytes()
        assert drawn == (tmp_path / "second" / plot.name).read_bytes()
        assert len(drawn) < MAX_SVG_BYTES
        assert b"<text" in drawn and b"<dc:date>" not in drawn


@pytest.mark.medium
def test_every_plot_of_the_page_is_what_the_results_say(main: Main, tmp_path: Path) -> None:
    assert main(["--out", str(tmp_path)]) == 0
    for plot in sorted(tmp_path.iterdir()):
        assert plot.read_bytes() == (PLOTS / plot.name).read_bytes(), "run `python -m benchmarks.plots`"


def test_what_cannot_be_drawn_is_skipped(main: Main, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    append_rows(tmp_path / "results.csv", mps_rows())
    assert main(["--results", str(tmp_path / "results.csv"), "--out", str(tmp_path)]) == 0
    assert [path.name for path in tmp_path.glob("*.svg")] == ["mps_cap.svg"]
    said = capsys.readouterr().out
    assert "workers: skipped, no rows of systems `baton NPMD`" in said
