"""Loads whose prompts were partly seen before, against a server that keeps what it has seen."""

import math
import shlex
from pathlib import Path

import pytest

from deploy.bench import moved
from deploy.bench.command import main
from deploy.bench.origin import ROOT
from tests.support.completions_server import FakeServer, Running, figures

COMMON = shlex.split("--warmup 0 --vocab-size 500 --hardware here")


def run(servers: Running, results: Path, flags: str, server: FakeServer | None = None) -> FakeServer:
    server = servers.start(server or FakeServer(caches=True))
    assert main(["--url", server.url, *COMMON, *shlex.split(flags), "--results", str(results)]) == 0
    return server


def test_primed_prefixes_are_hit_by_every_request(servers: Running, tmp_path: Path) -> None:
    results = tmp_path / "results.csv"
    flags = "--concurrency 1 --num-prompts 5 --prefixes 2x48 --primed --input-len 16 --output-len 2"
    server = run(servers, results, flags)
    rows = figures(results)
    primers, sent = server.requests[:2], server.requests[2:]
    assert [(len(each["prompt"]), each["max_tokens"]) for each in primers] == [(48, 1)] * 2
    assert {tuple(each["prompt"][:48]) for each in sent} == {tuple(each["prompt"]) for each in primers}
    assert (rows["requests"].value, rows["hit_rate"].value, rows["hit_rate"].unit) == (5, 75, "%")
    assert rows["ttft_p50"].workload == "concurrency 1, primed 2x48+16/2, 5 requests"


def test_others_come_between_a_prefix_and_what_follows_it(servers: Running, tmp_path: Path) -> None:
    results = tmp_path / "results.csv"
    flags = "--concurrency 1 --num-prompts 2 --prefixes 2x48 --primed --crowd-out 100 --input-len 16 --output-len 2"
    server = run(servers, results, flags)
    assert [len(each["prompt"]) for each in server.requests] == [48, 48, 48, 48, 48, 64, 64]
    assert len({tuple(each["prompt"][:48]) for each in server.requests}) == 5
    assert figures(results)["hit_rate"].value == 75
    assert figures(results)["hit_rate"].workload == "concurrency 1, crowded out, primed 2x48+16/2, 2 requests"


@pytest.mark.medium
def test_others_are_long_where_prefixes_are(servers: Running, tmp_path: Path) -> None:
    flags = "--concurrency 1 --num-prompts 1 --prefixes 1x5000 --primed --crowd-out 9000 --input-len 16 --output-len 2"
    server = run(servers, tmp_path / "results.csv", flags)
    assert [len(each["prompt"]) for each in server.requests] == [5000, 4096, 4096, 4096, 5016]


def test_a_prefix_that_was_refused_is_an_error(servers: Running, tmp_path: Path) -> None:
    server, results = servers.start(FakeServer(fault="refused")), tmp_path / "results.csv"
    flags = shlex.split("--concurrency 1 --num-prompts 2 --prefixes 3x16 --primed --input-len 16 --output-len 2")
    assert main(["--url", server.url, *COMMON, *flags, "--results", str(results)]) == 1
    rows = figures(results)
    assert (rows["requests"].value, rows["errors"].value) == (2, 1)


def test_texts_have_as_many_tokens_as_ids(servers: Running, tmp_path: Path) -> None:
    results = tmp_path / "results.csv"
    flags = "--all-at-once --num-prompts 4 --prefixes 1x48 --primed --input-len 16 --output-len 2"
    server = run(servers, results, f"{flags} --tokenizer '{ROOT}/deploy/demo_model'")
    assert all(isinstance(each["prompt"], str) for each in server.requests)
    assert [len(each["prompt"].split()) for each in server.requests] == [48, 64, 64, 64, 64]
    assert figures(results)["hit_rate"].value == 75
    assert figures(results)["hit_rate"].workload == "at once, text of primed 1x48+16/2, 4 requests"


@pytest.mark.medium
def test_a_turn_is_all_that_was_said_before_and_more(servers: Running, tmp_path: Path) -> None:
    results = tmp_path / "results.csv"
    flags = "--users 3 --turns 4 --prefixes 1x32 --input-len 10 --output-len 6 --think-s 0.01"
    server = run(servers, results, flags, FakeServer(caches=True, tokens_per_event=4))
    rows = figures(results)
    assert rows["hit_rate"].workload == "3 users x 4 turns after 0.01 s, 1x32+10/6, 12 requests"
    assert (rows["requests"].value, rows["errors"].value) == (12, 0)
    by_length = sorted(server.requests, key=lambda each: len(each["prompt"]))
    assert [len(each["prompt"]) for each in by_length[::3]] == [42, 58, 74, 90]
    assert len({tuple(each["prompt"][:32]) for each in by_length}) == 1
    prompts = [each["prompt"] for each in by_length]
    for prompt in prompts[3:]:
        before, reply = prompt[:-16], prompt[-16:-10]
        assert before in prompts and reply == [sum(before) % 1000 + place for place in range(6)]
    num_cached = 2 * 32 + 3 * (32 + 48 + 64)  # the first opening finds nothing
    assert rows["hit_rate"].value == pytest.approx(100 * num_cached / (3 * (42 + 58 + 74 + 90)), rel=1e-4)


@pytest.mark.medium
def test_later_turns_have_figures_of_their_own(servers: Running, tmp_path: Path) -> None:
    results = tmp_path / "results.csv"
    run(servers, results, "--users 2 --turns 3 --input-len 32 --output-len 16")
    rows = figures(results)
    assert (rows["requests"].value, rows["later_turns_requests"].value) == (6, 4)
    assert rows["later_turns_hit_rate"].value == pytest.approx(100 * (32 + 80) / (80 + 128), rel=1e-4)
    assert "moved_prompts" not in rows and "later_turns_ttft_p50" in rows


def test_what_moves_during_rounds_is_told(servers: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moved, "SETTLE_S", 0.0)
    results = tmp_path / "results.csv"
    flags = "--concurrency 1 --num-prompts 5 --rounds 2 --prefixes 2x48 --primed --input-len 16 --output-len 2"
    run(servers, results, flags, FakeServer(pulled_bytes=3_000_000))
    rows = figures(results)
    assert (rows["moved_prompts"].value, rows["moved_prompts"].unit) == (60, "MB"), "of two workers"
    assert rows["moved_replies"].value == 120


@pytest.mark.medium
def test_a_conversation_ends_where_a_turn_fails(
    servers: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server, results = servers.start(FakeServer(fault="no ids")), tmp_path / "results.csv"
    flags = shlex.split("--users 2 --turns 4 --input-len 10 --output-len 6 --deadline-s 60")
    assert main(["--url", server.url, *COMMON, *flags, "--results", str(results)]) == 1
    rows = figures(results)
    num_answered = rows["requests"].value + rows["errors"].value
    assert num_answered == len(server.requests) < 8, "the third of all is nobody's fourth, whoever is faster"
    assert "asked for the ids of 6 tokens, got 0" in capsys.readouterr().out


@pytest.mark.medium
def test_the_hit_rate_stands_beside_that_of_a_server_that_tells_none(servers: Running, tmp_path: Path) -> None:
    results = tmp_path / "results.csv"
    silent = servers.start(FakeServer())
    flags = "--rate 100 --num-prompts 8 --prefixes 4x32 --zipf 1.5 --primed --input-len 32 --output-len 2"
    run(servers, results, f"{flags} --vs {silent.url} --vs-system silent")
    row = figures(results)["hit_rate"]
    assert (row.value, row.compared_with) == (50, "silent") and math.isnan(row.compared_value)
    assert row.workload == "100 req/s, primed 4x32 (Zipf 1.5)+32/2, 8 requests"
    run(servers, alone := tmp_path / "alone.csv", flags, FakeServer())
    assert "hit_rate" not in figures(alone), "nobody told one"


@pytest.mark.parametrize(
    "flags",
    [
        "--rate 1 --zipf 1",
        "--rate 1 --primed",
        "--rate 1 --prefixes 2x8 --crowd-out 9000",
        "--rate 1 --prefixes 8",
        "--rate 1 --prefixes 2x8 --zipf -1",
        "--rate 1 --prefixes 2x8 --prompt-file there",
        "--users 0",
        "--users 2 --turns 0",
        "--users 2 --think-s -1",
        "--users 2 --tokenizer there",
        "--users 2 --structured 0.5",
        "--users 2 --beside 20:128/8",
    ],
)
def test_flags_that_mean_nothing_together_are_refused(flags: str) -> None:
    with pytest.raises(SystemExit):
        main(shlex.split(flags))


def test_a_tokenizer_that_is_not_there_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--rate", "1", "--tokenizer", str(tmp_path)]) == 1
    assert "has no tokenizer.json" in " ".join(capsys.readouterr().out.split())
