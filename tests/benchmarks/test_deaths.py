"""A worker is killed for real, the streams go on, and what they noticed is kept."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.deaths import Fleet, main, pause_s
from deploy.bench.stats import RequestRecord
from tests.e2e.system import START_TIMEOUT_S
from tests.support.completions_server import figures
from tests.support.ports import ReservedPort

ROOT = Path(__file__).parents[2]


def test_a_pause_is_the_longest_gap_that_ends_after_the_kill() -> None:
    stream = RequestRecord(sent_s=0.0, chunk_times_s=[1.0, 5.0, 5.1, 5.9, 6.0])
    assert pause_s(stream, 5.05) == pytest.approx(0.8)
    assert pause_s(stream, 4.0) == pytest.approx(4.0)
    assert pause_s(stream, 7.0) == 0.0


def test_a_worker_is_replaced_when_as_many_serve_and_are_in_reserve_as_before() -> None:
    before = Fleet({"prefill": [1], "decode": [2]}, {"prefill": [], "decode": [3]})
    nobody: dict[str, list[int]] = {"prefill": [], "decode": []}
    assert not before.is_replaced(2, before), "the router has not noticed"
    assert not before.is_replaced(2, Fleet({"prefill": [1], "decode": [3]}, nobody))
    assert not before.is_replaced(2, Fleet({"prefill": [1], "decode": [3, 4]}, nobody))
    assert not before.is_replaced(2, Fleet({"prefill": [], "decode": [4]}, {"prefill": [], "decode": [3]}))
    assert before.is_replaced(2, Fleet({"prefill": [1], "decode": [4]}, {"prefill": [], "decode": [3]}))


@pytest.fixture
def url() -> Iterator[str]:
    """Of a system that starts killed workers again, and has one more for that long."""
    with ReservedPort() as port:
        command = [sys.executable, "-m", "deploy.cli", "serve", "deploy/demo_model", "--device", "cpu",
                   "--standby", "decode", "--port", str(port.number)]  # fmt: skip
        with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None and any(line.startswith("ready: ") for line in process.stderr)
            yield f"http://127.0.0.1:{port.number}"
            process.terminate()
            assert process.wait(START_TIMEOUT_S) == 0


@pytest.mark.slow
def test_streams_go_on_after_a_death(url: str, tmp_path: Path) -> None:
    results = tmp_path / "results.csv"
    flags = ["--streams", "4", "--kills", "1", "--input-len", "8", "--max-tokens", "1900", "--vocab-size", "250"]
    assert main(["--url", url, *flags, "--before-s", "0.2", "--results", str(results), "--hardware", "here"]) == 0
    rows = figures(results)
    assert set(rows) == {"pause_p50", "pause_max", "replaced_max"}
    assert rows["pause_max"].workload == "1 kills of a decode worker under 4 streams of 8 tokens, 1 in reserve"
    assert 0 < rows["pause_max"].value < 60_000
