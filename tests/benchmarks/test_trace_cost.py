from pathlib import Path

from benchmarks.trace_cost import main
from deploy.bench.results import read_rows


def test_off_and_on_give_a_row_each(tmp_path: Path) -> None:
    results = tmp_path / "results.csv"
    assert main(["--turns", "300", "--hardware", "a CPU", "--results", str(results)]) == 0
    rows = read_rows(results)
    assert [row.figure for row in rows] == ["turn_untraced", "turn_traced"]
    assert all(row.value > 0 for row in rows)
