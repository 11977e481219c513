import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.step_trace import main
from deploy.bench.results import read_rows

Checkpoint = Callable[[str], tuple[Path, Any]]


@pytest.mark.medium
def test_a_traced_run_gives_a_row_a_figure_and_a_trace(checkpoint: Checkpoint, tmp_path: Path) -> None:
    directory, _ = checkpoint("qwen3-tied")
    results = tmp_path / "results.csv"
    flags = ["--batches", "1,3", "--context", "20", "--steps", "12", "--device", "cpu", "--hardware", "a CPU"]
    assert main([str(directory), *flags, "--results", str(results), "--out", str(tmp_path)]) == 0
    rows = read_rows(results)
    figures = ["host_apply_p50", "host_launch_p50", "host_collect_p50", "host_busy_p99"]
    assert [row.figure for row in rows] == 2 * figures
    assert all(row.value > 0 for row in rows)
    assert rows[-1].workload == "decode steps launched ahead, 3 sequences at 20 tokens"
    [path] = tmp_path.glob("steps.3x20.*.jsonl")
    names = [json.loads(line)["name"] for line in path.read_text().splitlines()[1:]]
    assert names.count("launch") == 12


@pytest.mark.medium
def test_what_does_not_fit_is_left_out(checkpoint: Checkpoint, tmp_path: Path) -> None:
    directory, _ = checkpoint("qwen3-tied")
    results = tmp_path / "results.csv"
    flags = ["--batches", "1", "--context", "500", "--steps", "12", "--device", "cpu", "--hardware", "a CPU"]
    assert main([str(directory), *flags, "--results", str(results)]) == 0
    assert read_rows(results) == []
