"""The load generator against a small server that speaks the same protocol, well or badly."""

import json
import shlex
from pathlib import Path

import pytest

from deploy.bench.command import main
from tests.support.completions_server import FakeServer, Running, figures


@pytest.mark.medium
@pytest.mark.parametrize("mode", [["--rate", "200"], ["--concurrency", "3"], ["--all-at-once"]])
def test_every_mode_counts_every_request_and_token(servers: Running, tmp_path: Path, mode: list[str]) -> None:
    server = servers.start(FakeServer())
    results = tmp_path / "results.csv"
    flags = shlex.split("--num-prompts 10 --warmup 2 --input-len 7 --output-len 5 --vocab-size 100 --hardware here")
    assert main(["--url", server.url, *mode, *flags, "--results", str(results)]) == 0
    rows = figures(results)
    assert len(server.requests) == 12
    assert all(len(request["prompt"]) == 7 and request["model"] == "fake-model" for request in server.requests)
    assert (rows["requests"].value, rows["errors"].value) == (10, 0)
    assert rows["output_throughput"].value == pytest.approx(5 * rows["request_throughput"].value, 1e-4)
    assert rows["total_throughput"].value == pytest.approx(12 * rows["request_throughput"].value, 1e-4)
    assert {f"{gap}_p{percent}" for gap in ("first_gap", "later_gap") for percent in (50, 90, 99)} <= set(rows)
    assert (rows["ttft_p50"].hardware, rows["ttft_p50"].model) == ("here", "fake-model")


def test_two_servers_get_the_same_prompts_turn_by_turn(servers: Running, tmp_path: Path) -> None:
    mine, theirs = servers.start(FakeServer()), servers.start(FakeServer(tokens_per_event=2))
    results = tmp_path / "results.csv"
    flags = shlex.split("--concurrency 2 --num-prompts 4 --rounds 2 --warmup 0 --input-range 3-9 --output-range 4-8")
    labels = ["--vs-system", "rival", "--results", str(results)]
    assert main(["--url", mine.url, "--vs", theirs.url, *flags, *labels]) == 0
    sent = [sorted(json.dumps(request["prompt"]) for request in server.requests) for server in (mine, theirs)]
    assert len(sent[0]) == 8
    assert sent[0] == sent[1]
    row = figures(results)["requests"]
    assert (row.value, row.compared_with, row.compared_value) == (8, "rival", 8)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("refused", "HTTP 503"),
        ("short", "asked for 5 tokens, got 4"),
        ("broken", "worker lost"),
        ("cut", "ended without [DONE]"),
    ],
)
def test_a_spoilt_reply_is_counted_and_shown(
    servers: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str], fault: str, message: str
) -> None:
    server = servers.start(FakeServer(fault=fault))
    results = tmp_path / "results.csv"
    flags = shlex.split("--concurrency 1 --num-prompts 9 --warmup 0 --input-len 4 --output-len 5")
    assert main(["--url", server.url, *flags, "--results", str(results)]) == 1
    rows = figures(results)
    assert (rows["requests"].value, rows["errors"].value) == (6, 3)
    assert message in capsys.readouterr().out
    assert main(["--url", server.url, *flags, "--allow-errors"]) == 0


@pytest.mark.medium
def test_a_stream_beside_has_figures_of_its_own(servers: Running, tmp_path: Path) -> None:
    server = servers.start(FakeServer())
    results = tmp_path / "results.csv"
    flags = shlex.split("--rate 20 --num-prompts 10 --warmup 0 --input-len 30 --output-len 2 --beside 100:4/3")
    assert main(["--url", server.url, *flags, "--results", str(results)]) == 0
    rows = figures(results)
    num_beside = sum(len(request["prompt"]) == 4 and request["max_tokens"] == 3 for request in server.requests)
    assert (rows["requests"].value, rows["beside_requests"].value) == (10, num_beside)
    assert num_beside == len(server.requests) - 10 > 0
    assert rows["beside_ttft_p99"].workload.endswith("beside 100 req/s of 4/3")


@pytest.mark.medium
def test_replies_held_to_a_schema_have_figures_of_their_own(servers: Running, tmp_path: Path) -> None:
    server = servers.start(FakeServer())
    results = tmp_path / "results.csv"
    flags = shlex.split("--concurrency 2 --num-prompts 8 --warmup 0 --input-len 4 --output-len 5 --structured 0.25")
    assert main(["--url", server.url, *flags, "--results", str(results)]) == 0
    rows = figures(results)
    assert (rows["requests"].value, rows["structured_requests"].value) == (6, 2)
    forms = [request["response_format"] for request in server.requests if "response_format" in request]
    assert [form["type"] for form in forms] == ["json_schema"] * 2
    assert rows["tpot_p50"].workload.endswith("25% held to a schema")
    assert main(["--url", server.url, *flags, "--structured", "1", "--results", str(tmp_path / "all.csv")]) == 0
    rows = figures(tmp_path / "all.csv")
    assert rows["requests"].value == 8 and "structured_requests" not in rows


def test_goodput_is_reported_when_limits_are_given(servers: Running, tmp_path: Path) -> None:
    server = servers.start(FakeServer())
    results = tmp_path / "results.csv"
    flags = shlex.split(
        "--all-at-once --num-prompts 4 --warmup 0 --input-len 4 --output-len 5 --slo ttft=60000,tpot=60000"
    )
    assert main(["--url", server.url, *flags, "--results", str(results)]) == 0
    rows = figures(results)
    assert rows["goodput"].value == rows["request_throughput"].value
