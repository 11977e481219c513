"""`baton bench`: the load client with flags left out, the line that it shows meanwhile, and its picture."""

import os
import subprocess
import sys
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from deploy import cli
from deploy.bench.live import Live, progress_on
from deploy.bench.plot import Seen, draw
from deploy.bench.stats import RequestRecord
from tests.support.answering import answering
from tests.support.completions_server import FakeServer, Running, figures
from tests.support.marks import first_then

ROOT = Path(__file__).parents[3]


def run(*flags: str) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["baton", "bench", *flags])
        with pytest.raises(SystemExit) as ended:
            cli.main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.mark.medium
@pytest.mark.parametrize("suffix", first_then(pytest.mark.slow, ["svg", "png"]))
def test_what_is_left_out_suits_every_model_and_a_picture_is_drawn(
    suffix: str, servers: Running, tmp_path: Path
) -> None:
    server, results, picture = servers.start(FakeServer()), tmp_path / "results.csv", tmp_path / f"run.{suffix}"
    few = ("--num-prompts", "6", "--input-len", "9", "--output-len", "5", "--warmup", "0")
    assert run("--url", server.url, *few, "--plot", str(picture), "--results", str(results)) == 0
    assert all(max(request["prompt"]) < 1000 for request in server.requests)
    assert figures(results)["requests"].value == 6
    beginning = picture.read_bytes()[:4]
    assert beginning == (b"\x89PNG" if suffix == "png" else b"<?xm")


@pytest.mark.medium
def test_a_run_without_a_reply_has_a_picture_too(tmp_path: Path) -> None:
    picture = tmp_path / "run.svg"
    flags = ("--url", "http://127.0.0.1:9", "--model", "m", "--num-prompts", "2", "--warmup", "0")
    assert run(*flags, "--plot", str(picture)) == 1
    assert picture.exists()


def test_the_first_server_is_shown_a_key_and_nobody_else(
    servers: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine, other, key = (
        servers.start(FakeServer(api_key="sk-0123456789abcdef")),
        servers.start(FakeServer()),
        tmp_path / "key",
    )
    few = ("--url", mine.url, "--vs", other.url, "--num-prompts", "3", "--output-len", "2", "--warmup", "0")
    assert run(*few) == 1 and "--api-key-file" in " ".join(capsys.readouterr().out.split())
    key.write_text("sk-0123456789abcdef\nanother\n")
    assert run(*few, "--api-key-file", str(key)) == 0
    assert len(mine.requests) == 3 and set(other.shown) == {""}


@pytest.mark.parametrize("content", ["", "\n", "k\0k", None])
def test_a_file_without_a_key_is_refused(
    content: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = tmp_path / "key"
    if content is not None:
        key.write_text(content)
    assert run("--api-key-file", str(key)) == 2
    assert str(key) in capsys.readouterr().err


def test_a_key_is_not_awaited_from_a_named_pipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = tmp_path / "key"
    os.mkfifo(key)
    assert run("--api-key-file", str(key)) == 2
    assert "it is a named pipe" in capsys.readouterr().err


HEAD = b"HTTP/1.1 200 OK\r\n\r\n"
OTHERS = [
    b"SSH-2.0-OpenSSH_9.2\r\n",
    HEAD + b"{}",
    HEAD + b"[" * 100_000,
    HEAD + b'{"data": []}',
    HEAD + b" " * 2_000_000,
]


@pytest.mark.parametrize("answer", OTHERS, ids=range(len(OTHERS)))
def test_another_program_is_named_and_nothing_is_sent_to_it(answer: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    with answering(answer) as url:
        assert run("--url", url) == 1
    assert "tells of no model" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("url", "trouble"),
    [
        ("", "tells of no model"),
        ("router", "tells of no model"),
        ("http://a:b", "tells of no model"),
        ("http://127.0.0.1:9", "does not answer"),
    ],
)
def test_where_nobody_answers_there_is_one_line(url: str, trouble: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--url", url) == 1
    assert f"'{url}' {trouble} (" in " ".join(capsys.readouterr().out.split())


def test_a_picture_shows_all_of_the_longest_run() -> None:
    """Of two servers, the slower first and the faster first: no panel ends before what is drawn in it does."""

    def seen(label: str, num_s: int) -> Seen:
        times_s = [0.5 * (step + 1) for step in range(2 * num_s)]
        return Seen(label, [RequestRecord(sent_s=0.0, ended_s=float(num_s), chunk_times_s=times_s)])

    for systems in ([seen("a", 30), seen("b", 5)], [seen("b", 5), seen("a", 30)], [seen("a", 30)]):
        first, gaps, rate, at_work = draw("a run", systems).axes
        for axes in (first, rate, at_work):
            drawn = np.concatenate([np.asarray(line.get_xdata(), float) for line in axes.lines])
            left, right = axes.get_xlim()
            assert left <= drawn.min() and drawn.max() <= right
        assert rate.get_xlim()[0] == 0.0 and gaps.get_xlim() == (0.0, 1000.0)


@pytest.mark.medium
def test_what_the_client_needs_and_is_not_installed_is_named_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "rich.py").write_text("raise ModuleNotFoundError(\"No module named 'rich'\")")
    command = [sys.executable, "-m", "deploy.cli", "bench", "--url", "http://127.0.0.1:9"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100, check=False)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and "'rich'" in line and 'pip install -c constraints.txt -e ".[bench]"' in line


def test_what_a_picture_needs_is_asked_for_before_anything_is_sent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("deploy.bench.command.find_spec", lambda name: None)
    assert run("--url", "http://127.0.0.1:9", "--plot", "run.svg") == 2
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("--plot: matplotlib is not installed: pip install ")


def test_a_picture_of_no_kind_is_refused_before_anything_is_sent(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--plot", "run.doc") == 2
    assert "'run.doc': a file that ends with .svg, .png or .pdf" in capsys.readouterr().err


def test_the_line_says_what_was_seen_so_far_and_in_the_end_all() -> None:
    shown = StringIO()
    with progress_on(Console(file=shown, width=120)) as progress:
        live = Live(progress, "baton", 3)
        assert live.text(1.0) == ""
        for ttft_s in (0.5, 0.1):
            record = RequestRecord(sent_s=1.0, ended_s=3.0, num_output_tokens=20)
            record.chunk_times_s = [1.0 + ttft_s, 3.0]
            live.note(record)
        assert live.text(2.0) == "TTFT 300 ms, p99 496; 20 tokens/s"
        live.note(RequestRecord(sent_s=1.0, error="HTTP 503"))
        assert live.text(4.0) == "TTFT 300 ms, p99 496; 10 tokens/s, 1 errors"
    assert ", 1 errors" in shown.getvalue()


def test_help_tells_the_defaults_that_hold_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "usage: baton bench [--rate R | --concurrency N" in shown
    assert "requests running at any time (default: 8, unless another mode is asked for)" in shown
    assert "prompt ids are below this (default: 1000)" in shown
