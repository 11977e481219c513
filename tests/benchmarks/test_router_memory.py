from pathlib import Path

import pytest

from benchmarks.process_memory import family, resident_bytes, weigh
from benchmarks.prompt_ids import main as measure_ids
from benchmarks.router_memory import main
from deploy.bench.results import read_rows


@pytest.mark.slow
def test_each_process_is_weighed_beside_a_load(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.router_memory.START_S", 5.0)
    results = tmp_path / "results.csv"
    arguments = ["--loads", "texts of 1 MB", "--seconds", "0.3", "--results", str(results)]
    assert main(["deploy/demo_model", *arguments]) == 0
    rows = {(row.workload, row.figure): row.value for row in read_rows(results)}
    beside = "router beside texts of 1 MB"
    processes = [name.removeprefix("rss_") for workload, name in rows if workload == beside and "rss_" in name]
    assert sorted(processes) == ["grammar_main", "reader_main", "router", "template_main"]
    for name in processes:
        assert 10 < rows[beside, f"pss_{name}"] < rows[beside, f"rss_{name}"] < rows[beside, "rss"]
    assert "x 400" in capsys.readouterr().out


def test_a_process_that_has_ended_weighs_nothing() -> None:
    assert (family(1 << 30), weigh(1 << 30), resident_bytes(1 << 30)) == ([], [], 0)


@pytest.mark.slow
def test_every_stage_of_a_prompt_of_ids_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.prompt_ids.REPETITIONS", 2)
    results = tmp_path / "results.csv"
    assert measure_ids(["deploy/demo_model", "--counts", "100,1000", "--results", str(results)]) == 0
    rows = read_rows(results)
    assert {row.workload for row in rows} == {"a prompt of 100 ids", "a prompt of 1000 ids"}
    assert all(row.value > 0 and row.unit == "us" for row in rows)
    assert "read_elsewhere" in capsys.readouterr().out
