"""Phases follow one another, figures are of the time in which a phase was on, and its second half by itself."""

from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.flip import Phase, Seen, main
from benchmarks.flip_simulated import main as simulated
from deploy.bench.stats import RequestRecord
from tests.support.completions_server import FakeServer, Running, figures

FLAGS = ["--phases", "3x40/2,2x4/20", "--phase-s", "0.3", "--rounds", "2", "--vocab-size", "100", "--hardware", "here"]


def test_throughput_is_of_what_came_in_time_and_latency_of_what_was_sent_in_time() -> None:
    early = RequestRecord(sent_s=1.0, ended_s=4.5, num_output_tokens=4, chunk_times_s=[2.0, 3.0, 4.0, 4.5])
    late = RequestRecord(sent_s=3.0, ended_s=9.0, num_output_tokens=4, chunk_times_s=[5.0, 9.0])
    lost = RequestRecord(sent_s=3.0, ended_s=3.5, error="lost")
    told = {figure.name: figure.value for figure in Seen([early, late, lost], [(0.0, 4.0), (8.0, 12.0)]).figures("a")}
    assert told["a_output"] == pytest.approx((2 + 2) / 8)  # two of four chunks; one of two, of two tokens each
    assert told["a_requests"] == pytest.approx(1 / 8)
    assert told["a_ttft_p50"] == pytest.approx(1500)
    assert told["a_settled_ttft_p50"] == pytest.approx(2000), "of the one that was sent in the second half"
    assert told["a_settled_requests"] == 0 and told["a_errors"] == 1


@pytest.mark.medium
def test_each_phase_has_its_rows_and_keeps_its_streams_running(servers: Running, tmp_path: Path) -> None:
    server, results = servers.start(FakeServer(gap_s=0.005)), tmp_path / "results.csv"
    assert main(["--url", server.url, *FLAGS, "--results", str(results), "--system", "baton --autoscale"]) == 0
    rows = figures(results)
    assert {"a_ttft_p50", "a_settled_output", "b_itl_p99", "b_errors"} <= set(rows)
    assert "role_changes" not in rows, "of a server that tells of none"
    assert rows["b_output"].system == "baton --autoscale"
    workload = "flip: 3 streams of 40/2, then 2 streams of 4/20, 0.3 s each, 2 times"
    assert rows["b_output"].workload == workload
    kinds = [len(request["prompt"]) for request in server.requests]
    assert kinds[:3] == [40, 40, 40] and {40, 4} == set(kinds)
    assert sum(before != after for before, after in pairwise(kinds)) >= 3
    assert rows["b_output"].value > 0


@pytest.mark.medium
def test_a_request_that_fails_is_told(servers: Running) -> None:
    assert main(["--url", servers.start(FakeServer(fault="refused")).url, *FLAGS]) == 1


def test_where_nobody_answers_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--url", "http://127.0.0.1:9", *FLAGS]) == 1
    assert "does not answer" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("text", ["8000/32", "0x8/8", "4x8", "ax8/8"])
def test_what_is_no_phase_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--phases", text])
    assert "for example 64x8000/32" in capsys.readouterr().err
    assert str(Phase.parse("64x8000/32")) == "64 streams of 8000/32"


def test_the_simulator_shows_each_phase_on_each_choice_of_roles(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulated(["--layouts", "2P2D,3P1D", "--gpus", "4", "--phases", "8x4000/8,64x64/128"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "4 GPUs" in line]
    prompts, replies = lines[:2], lines[2:]
    rates = [[float(line.split("│")[3].replace(",", "")) for line in phase] for phase in (prompts, replies)]
    assert rates[0][0] < rates[0][1], "long prompts are served faster by three prefill workers"
    assert rates[1][0] > rates[1][1], "long replies by two decode workers"
    with pytest.raises(SystemExit):
        simulated(["--layouts", "2P"])
