"""A run is a line with its conditions and figures, and runs under equal conditions are one row of medians."""

import lzma
import math
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.tables.cells import merged
from deploy.bench.origin import ROOT, command_line, commit, hardware
from deploy.bench.results import HEADER, Row, append_rows, read_rows

LOAD = "w, with a comma"
ROW = Row("2026-01-02", "abc", "a GPU", "torch 9", "baton", "m", LOAD, "ttft_p50", 1.5, "ms", command="python x")
PAIR = replace(
    ROW, compared_with="vllm", compared_value=2.25, started_by="baton serve m", compared_started_by="vllm serve m"
)


def test_a_run_is_a_line_and_its_rows_come_back(tmp_path: Path) -> None:
    path = tmp_path / "results.csv"
    others = [
        replace(ROW, figure="hit_rate", value=math.nan, unit="%"),
        replace(ROW, figure="errors", value=0, unit=""),
    ]
    append_rows(path, [ROW, *others, replace(ROW, workload="another")])
    append_rows(path, [PAIR])
    assert len(lines := path.read_text().splitlines()) == 4
    assert lines[1].endswith(",ttft_p50=1.5 ms; hit_rate=nan %; errors=0")
    assert lines[3].endswith(",ttft_p50=1.5|2.25 ms")
    rows = read_rows(path)
    assert rows == [ROW, *others, replace(ROW, workload="another"), PAIR]
    assert [row.line for row in rows] == [2, 2, 2, 3, 4]


def test_figures_keep_six_digits(tmp_path: Path) -> None:
    path = tmp_path / "results.csv"
    append_rows(path, [replace(ROW, value=1 / 3), replace(ROW, figure="large", value=1234567.0)])
    assert [row.value for row in read_rows(path)] == [0.333333, 1234570]


def test_a_file_of_another_schema_is_left_alone_and_a_wrong_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "results.csv"
    path.write_text("when,what\n")
    with pytest.raises(ValueError, match=r"results\.csv has the columns when,what, not date,"):
        append_rows(path, [ROW])
    assert path.read_text() == "when,what\n"
    for wrong, problem in (
        ("2026-01-02,abc", "has 2 columns, 12 are needed"),
        (",".join("a" * 12), "'a' is no figure"),
    ):
        path.unlink()
        append_rows(path, [ROW])
        with path.open("a") as file:
            file.write(f"{wrong}\n")
        with pytest.raises(ValueError, match=f"line 3.*{problem}"):
            read_rows(path)


def test_runs_under_equal_conditions_are_one_row_at_the_place_of_the_last() -> None:
    values = ((3, 30.0), (1, math.nan), (2, 10.0))
    runs = [replace(PAIR, value=ours, compared_value=other, command=f"x --seed {ours}") for ours, other in values]
    runs[1] = replace(runs[1], date="2026-01-01")
    others = [
        replace(PAIR, commit="another"), replace(PAIR, stack=""), replace(PAIR, compared_started_by="vllm serve m -O0"),
        replace(PAIR, figure="ttft_p99"),
    ]  # fmt: skip
    found = merged([runs[0], *others, *runs[1:]])
    assert found == [*others, replace(runs[-1], value=2, compared_value=20, runs=tuple(runs))]


def test_archives_are_read_as_results_are(tmp_path: Path) -> None:
    archives = list((ROOT / "benchmarks" / "archive").glob("*.csv.xz"))
    for archive in archives:
        (tmp_path / archive.stem).write_bytes(lzma.decompress(archive.read_bytes()))
        assert read_rows(tmp_path / archive.stem)
    assert archives and sum(archive.stat().st_size for archive in archives) < 200_000, "it travels with each clone"


def test_a_command_is_told_without_how_servers_were_started(monkeypatch: pytest.MonkeyPatch) -> None:
    told = ["--rate", "4", "--started-by", "baton serve m", "--vs-started-by=vllm serve m", "--vs", "http://b"]
    monkeypatch.setattr("sys.argv", ["benchmarks/serve.py", *told])
    assert command_line() == "python -m benchmarks.serve --rate 4 --vs http://b"
    monkeypatch.setattr("sys.argv", ["/baton/benchmarks/sharing/__main__.py", "m"])
    assert command_line() == "python -m benchmarks.sharing m", "a package's"


def test_every_field_is_documented() -> None:
    readme = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in readme for name in HEADER)


def test_labels_are_never_empty() -> None:
    assert commit()
    assert hardware()
