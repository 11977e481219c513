import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from common.base.trace_events import DEVICE, LOOP, Tracer
from deploy.cli import main
from tests.support.traces import names_of, read_events, slices_of

REQUEST = "cmpl-0123-0"


class Writer:
    """The file of a worker, by hand."""

    def __init__(self, directory: Path, role: str, name: str, epoch: int = 1, *, boot: str = "b", late_s: int = 0):
        self.path = directory / f"{role}.{name}.{epoch:x}.jsonl"
        whose = {"role": role, "id": name, "epoch": epoch, "pid": 7, "host": "h", "boot": boot}
        clocks = {"monotonic_ns": (100 - late_s) * 10**9, "unix_ns": 10**18}
        self.write(json.dumps(whose | clocks) + "\n")
        self.tracer = Tracer(self.write)

    def write(self, text: str) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(text)


@pytest.fixture
def traced(tmp_path: Path) -> Path:
    """Three steps of a decode worker and one of a prefill worker."""
    worker = Writer(tmp_path, "decode", "decode-0").tracer
    for step in range(3):
        begin_s = 100.016 + 0.01 * step
        worker.slice(LOOP, "wait", begin_s + 0.002, begin_s + 0.008)
        worker.slice(LOOP, "turn", begin_s, begin_s + 0.009)
        args: dict[str, Any] = {"rows": 1} | ({"requests": [f"{REQUEST}#0"], "late": True} if step == 0 else {})
        worker.slice(DEVICE, "step", begin_s + 0.001, begin_s + 0.0109, args)
    Writer(tmp_path, "prefill", "prefill-0").tracer.slice(LOOP, "launch", 100.001, 100.011, {"tokens": 40})
    return tmp_path


def baton(monkeypatch: pytest.MonkeyPatch, *argv: str) -> int:
    monkeypatch.setattr(sys, "argv", ["baton", "trace", *argv])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_parts_become_one_trace(traced: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert baton(monkeypatch, str(traced)) == 0
    events = read_events(traced / "trace.json.gz")
    assert names_of(events) == {1: "prefill-0", 2: "decode-0"}
    assert [(e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"][:3] == [
        ("launch", 0, 10_000), ("turn", 15_000, 9_000), ("step", 16_000, 9_900)
    ]  # fmt: skip
    assert [e["name"] for e in slices_of(events, REQUEST)] == ["step"]
    assert {e["args"]["name"] for e in events if e["name"] == "thread_name"} == {"loop", "device"}


def test_slices_nest_on_a_machine_that_has_run_for_a_year(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, tracer = random.Random(1), Writer(tmp_path, "decode", "decode-0").tracer
    for turn in range(500):
        begin_s = 3.2e7 + turn * 1e-3
        cuts = sorted(begin_s + rng.uniform(0, 1e-3) for _ in range(4))
        tracer.slice(LOOP, "inner", cuts[1], cuts[2])
        tracer.slice(LOOP, "phase", cuts[0], cuts[3])
        tracer.slice(LOOP, "turn", begin_s, begin_s + 1e-3)
    assert baton(monkeypatch, str(tmp_path)) == 0
    assert sum(e["ph"] == "X" for e in read_events(tmp_path / "trace.json.gz")) == 1500


def test_the_summary_says_where_time_went(
    traced: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    baton(monkeypatch, str(traced), "--out", str(traced / "t.json"))
    told = capsys.readouterr().out
    [worker] = [line.split() for line in told.splitlines() if line.startswith("decode-0")]
    assert " ".join(worker) == "decode-0 0.0 s 3 9.90 ms 9.90 ms 96% 100.0 us 100.0 us 1 3000.0 us"
    assert f"events in {traced}/t.json" in told
    read_events(traced / "t.json")


def test_of_a_long_trace_the_last_seconds_are_enough(traced: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert baton(monkeypatch, str(traced), "--last-s", "0.0115") == 0
    slices = [e for e in read_events(traced / "trace.json.gz") if e["ph"] == "X"]
    assert [e["name"] for e in slices] == ["step", "turn", "step", "wait"]


def test_what_is_no_slice_is_left_out_and_told(
    traced: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with (traced / "prefill.prefill-0.1.jsonl").open("a", encoding="utf-8") as file:
        file.write('[]\nnull\n{"track":1,"name":"x"}\n{"track":1,"na')
    (traced / "decode.decode-1.1.jsonl").write_text("")
    (traced / "decode.decode-2.1.jsonl").write_bytes(b"\xff\x00\n")
    (traced / "decode.decode-3.1.jsonl").write_text('{"role": "decode"}\n')
    assert baton(monkeypatch, str(traced)) == 0
    told = capsys.readouterr().out
    assert "left out: prefill.prefill-0.1.jsonl: lines without a slice: 3, 4, 5, 6" in told
    for number in (1, 2, 3):
        assert f"left out: decode.decode-{number}.1.jsonl: its first line names no worker" in told
    assert len([e for e in read_events(traced / "trace.json.gz") if e["ph"] == "X"]) == 10


def test_what_is_no_file_is_not_waited_for(
    traced: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(traced / "pipe.jsonl")
    (traced / "directory.jsonl").mkdir()
    (traced / "loop.jsonl").symlink_to("loop.jsonl")
    (traced / "endless.jsonl").symlink_to("/dev/zero")
    assert baton(monkeypatch, str(traced)) == 0
    told = capsys.readouterr().out
    for name in ("pipe", "endless"):
        assert f"left out: {name}.jsonl: it is " in told
    assert told.count("left out: ") == 4


def test_parts_of_another_start_of_the_machine_are_put_in_place_by_the_wall_clock(
    traced: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Writer(traced, "decode", "decode-0", 2, boot="other", late_s=90)
    other.tracer.slice(LOOP, "turn", 10.06, 10.07)  # of its own clock: 100.06 of the others'
    older = Writer(traced, "decode", "decode-0", 2, boot="other", late_s=90)
    older.path.rename(older.path.with_name("decode.decode-0.2.older.jsonl"))
    assert baton(monkeypatch, str(traced)) == 0
    events = read_events(traced / "trace.json.gz")
    assert sorted(names_of(events).values()) == ["decode-0, start 1", "decode-0, start 2", "prefill-0"]
    [pid] = [pid for pid, name in names_of(events).items() if name.endswith("2")]
    [turn] = [e for e in events if e["pid"] == pid and e["ph"] == "X"]
    assert turn["ts"] == pytest.approx(59_000, abs=1)


@pytest.mark.parametrize(
    ("name", "message"),
    [("none", "no such directory"), ("empty", "nothing was traced there (no .jsonl file with a step)")],
)
def test_where_nothing_was_traced_there_is_no_trace(
    name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    assert baton(monkeypatch, str(tmp_path / name)) == 2
    said = capsys.readouterr().err
    assert message in said
    assert "name the one that was given to --trace" in said
    assert not list((tmp_path / "empty").iterdir())


def test_a_trace_that_cannot_be_written_is_an_error(
    traced: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert baton(monkeypatch, str(traced), "--out", str(traced / "no" / "t.json")) == 2
    assert "No such file or directory; name a file to write to" in capsys.readouterr().err
