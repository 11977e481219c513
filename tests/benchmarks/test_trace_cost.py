import csv
from pathlib import Path

from benchmarks.trace_cost import main


def test_off_and_on_give_a_row_each(tmp_path: Path) -> None:
    results = tmp_path / "results.csv"
    assert main(["--turns", "300", "--hardware", "a CPU", "--results", str(results)]) == 0
    with results.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["figure"] for row in rows] == ["turn_untraced", "turn_traced"]
    assert all(float(row["value"]) > 0 for row in rows)
