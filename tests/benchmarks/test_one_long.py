"""Gaps fall into the spans that they lie in, and a stream that ends too early is an error, not a figure."""

import shlex
from pathlib import Path

import pytest

from benchmarks.one_long import Span, main
from deploy.bench.stats import RequestRecord
from tests.support.completions_server import FakeServer, Running, figures

LENGTHS = "--input-len 5 --long-len 50 --long-output-len 9 --vocab-size 100"
FLAGS = shlex.split(f"--streams 1,3 {LENGTHS} --alone-s 0.5 --hardware here")


def test_a_gap_belongs_to_the_span_that_it_lies_in() -> None:
    stream = RequestRecord(sent_s=0.0, chunk_times_s=[1.0, 1.1, 1.3, 2.0, 2.4])
    (p50, p99) = Span("decode", 1.05, 2.0).figures([stream])
    assert p50.name == "itl_decode_p50" and p50.value == pytest.approx(450)
    assert p99.name == "itl_decode_p99" and p99.value == pytest.approx(695)


@pytest.mark.medium
def test_each_load_has_its_rows_beside_the_other_server(servers: Running, tmp_path: Path) -> None:
    mine, theirs = servers.start(FakeServer(gap_s=0.01)), servers.start(FakeServer(gap_s=0.02))
    results = tmp_path / "results.csv"
    labels = ["--vs-system", "rival", "--results", str(results)]
    assert main(["--url", mine.url, "--vs", theirs.url, *FLAGS, *labels]) == 0
    rows = figures(results)
    assert set(rows) == {
        *(f"itl_{span}_p{point}" for span in ("alone", "prefill", "decode") for point in (50, 99)),
        "long_ttft",
        "long_ttft_alone",
    }
    assert rows["itl_decode_p50"].workload == "3 streams of 5 tokens and one of 50"
    assert rows["itl_alone_p50"].value >= 10 and rows["itl_alone_p50"].compared_value >= 20
    assert [len(request["prompt"]) for request in mine.requests] == [50, 5, 50, 50, 5, 5, 5, 50]


def test_a_stream_that_ends_early_spoils_the_run(servers: Running, capsys: pytest.CaptureFixture[str]) -> None:
    server = servers.start(FakeServer())
    assert main(["--url", server.url, *FLAGS, "--max-tokens", "3"]) == 1
    assert "a stream ended early" in capsys.readouterr().out
