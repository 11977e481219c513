"""Starts are real, and the parts of each process are kept."""

from pathlib import Path

import pytest

from benchmarks.start import Start, figures_of, main, parse_args, start_once
from deploy.bench.results import read_rows


@pytest.mark.medium
def test_a_start_is_kept_with_the_parts_of_every_process(tmp_path: Path) -> None:
    results = tmp_path / "results.csv"
    own = ["deploy/demo_model", "--starts", "1", "--kinds", "cold", "--results", str(results), "--hardware", "here"]
    assert main([*own, "--", "--device", "cpu"]) == 0
    rows = read_rows(results)
    values = {row.figure: row.value for row in rows}
    assert {row.workload for row in rows} == {"start, nothing compiled before"}
    assert 0 < values["ready"] < values["first_token"]
    assert values["start_cpu"] > 0
    for process in ("baton", "router", "memory", "prefill-0", "decode-0"):
        cpu_s = values[f"start_{process}_CPU"]
        assert 0 < cpu_s < values["start_cpu"]
        parts = [value for name, value in values.items() if name.startswith(f"start_{process}_")]
        parts.remove(cpu_s)
        assert 0 < sum(parts) <= values["ready"] + 0.1, f"{process}: {parts}"


def test_a_server_that_ends_before_it_is_ready_is_no_start(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no start of /no/such/model"):
        start_once("/no/such/model", ["--device", "cpu"], tmp_path, 60.0)


def test_figures_are_medians_and_a_part_may_be_missing() -> None:
    starts = [
        Start(2.0, 3.0, 9.0, {"router": [("begins", 0.1), ("imports", 1.0)]}),
        Start(4.0, 5.0, 8.0, {"router": [("begins", 0.3)]}),
        Start(9.0, 9.5, 7.0, {"router": [("begins", 0.9), ("imports", 2.0)]}),
    ]
    assert [(each.name, each.value) for each in figures_of(starts)] == [
        ("ready", 4.0), ("first_token", 5.0), ("start_cpu", 8.0), ("start_router_begins", 0.3),
        ("start_router_imports", 1.5),
    ]  # fmt: skip


def test_what_stands_behind_two_dashes_goes_to_the_server() -> None:
    args = parse_args(["MODEL", "--starts", "2", "--", "--device", "cpu", "--", "--starts"])
    assert (args.model, args.starts, args.flags) == ("MODEL", 2, ["--device", "cpu", "--", "--starts"])
