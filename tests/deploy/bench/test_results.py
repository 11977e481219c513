import csv
from dataclasses import replace
from pathlib import Path

import pytest

from deploy.bench.results import Row, append_rows, commit, hardware

LOAD = "w, with a comma"
ROW = Row("2026-01-02", "abc", "a GPU", "torch 9", "baton", "m", LOAD, "ttft_p50", "1.5", "ms", "", "", "python x")


def test_rows_are_appended_under_one_header(tmp_path: Path) -> None:
    path = tmp_path / "results.csv"
    append_rows(path, [ROW])
    append_rows(path, [replace(ROW, figure="tpot_p50"), replace(ROW, figure="errors")])
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["figure"] for row in rows] == ["ttft_p50", "tpot_p50", "errors"]
    assert rows[0]["workload"] == LOAD


def test_a_file_of_another_schema_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "results.csv"
    path.write_text("when,what\n")
    with pytest.raises(ValueError, match="has the columns when,what"):
        append_rows(path, [ROW])
    assert path.read_text() == "when,what\n"


def test_every_column_is_documented() -> None:
    readme = (Path(__file__).parents[3] / "benchmarks" / "README.md").read_text()
    assert all(f"`{column}`" in readme for column in Row.__dataclass_fields__)


def test_labels_are_never_empty() -> None:
    assert commit()
    assert hardware()
