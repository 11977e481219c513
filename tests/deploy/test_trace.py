import json
import os
import random
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from common.base.trace_events import DEVICE, FIRST_LANE, LOOP, Tracer, flow_id
from common.base.trace_file import PROCESS
from deploy.cli import main
from deploy.trace.merge import nested
from deploy.trace.parts import MAX_LINE_CHARS, Slice
from tests.support.traces import assert_nested, flow_of, names_of, read_events, slices_of

REQUEST = "cmpl-0123-0"
FACTS = {
    "request_id": REQUEST, "client_request_id": "mine", "state": "finished", "prompt_tokens": 40, "output_tokens": 9,
    "attempts": 1, "read_ms": 1.0, "queued_ms": 2.0, "prefill_ms": 10.0, "handoff_ms": 3.0, "decode_ms": 30.0,
    "ttft_ms": 12.0, "e2e_ms": 45.0, "prefill_worker": "prefill-0", "decode_worker": "decode-0",
}  # fmt: skip


class Writer:
    """The file of a process, by hand."""

    def __init__(self, directory: Path, role: str, name: str, epoch: int = 1, *, boot: str = "b", late_s: float = 0.0):
        self.path = directory / f"{role}.{name}.{epoch:x}.jsonl"
        whose = {"role": role, "id": name, "epoch": epoch, "pid": 7, "host": "h", "boot": boot}
        clocks = {"monotonic_s": 100.0 - late_s, "unix_s": 1e9}
        self.write(json.dumps({"ph": "M", "name": PROCESS, "args": whose | clocks}) + "\n")
        self.tracer = Tracer(self.write)

    def write(self, text: str) -> None:
        append(self.path, text)


def append(path: Path, text: str) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(text)


@pytest.fixture
def traced(tmp_path: Path) -> Path:
    """A request's way, in files whose lines are in no order."""
    worker = Writer(tmp_path, "decode", "decode-0").tracer
    named = {"requests": [f"{REQUEST}#0"]}
    for step in range(3):
        begin_s = 100.016 + 0.01 * step
        worker.slice(LOOP, "wait", begin_s + 0.002, begin_s + 0.008)
        worker.slice(LOOP, "turn", begin_s, begin_s + 0.009)
        args: dict[str, Any] = {"rows": 1} | (named | {"late": True} if step == 0 else {})
        worker.slice(DEVICE, "step", begin_s + 0.001, begin_s + 0.0109, args)
    worker.flow(DEVICE, REQUEST, 100.018)
    worker.slice(LOOP, "collect", 100.047, 100.048, named)
    worker.flow(LOOP, REQUEST, 100.0475)
    router = Writer(tmp_path, "router", "router").tracer
    router.slice(FIRST_LANE, "queued", 100.0, 100.002, {"request": REQUEST, "attempt": 0})
    router.slice(FIRST_LANE, "finish", 100.049, 100.05, {"request": REQUEST})
    router.flow(FIRST_LANE, REQUEST, 100.0495)
    router.flow(FIRST_LANE, REQUEST, 100.001)
    router.slice(FIRST_LANE, "request", 100.0, 100.05, {"request": REQUEST} | FACTS)
    return tmp_path


def baton(monkeypatch: pytest.MonkeyPatch, *argv: str) -> int:
    monkeypatch.setattr(sys, "argv", ["baton", "trace", *argv])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_parts_become_one_trace(traced: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert baton(monkeypatch, str(traced)) == 0
    events = read_events(traced / "trace.json.gz")
    assert names_of(events) == {1: "router", 2: "decode-0"}
    flow = [(names_of(events)[e["pid"]], e["name"]) for e in flow_of(events, flow_id(REQUEST))]
    assert flow == [("router", "queued"), ("decode-0", "step"), ("decode-0", "collect"), ("router", "finish")]
    assert min(e["ts"] for e in events if "ts" in e) == 0
    assert len(slices_of(events, REQUEST)) == 5
    tracks = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert tracks == {"requests 1", "loop", "device"}


def test_slices_nest_although_times_were_rounded() -> None:
    """As of a machine that has run for a year, whose microseconds have no third decimal."""
    rng, slices = random.Random(1), []
    begin = 3.2e13
    for turn in range(500):
        ts = begin + turn * 1e3
        cuts = sorted(rng.uniform(0, 1e3) for _ in range(4))
        outer = [Slice(ts, 1e3, LOOP, "turn", {}), Slice(ts + cuts[0], cuts[3] - cuts[0], LOOP, "phase", {})]
        inner = [Slice(ts + a, b - a, LOOP, "part", {}) for a, b in pairwise(cuts)]
        slices += [*outer, *inner]
    slices.sort(key=lambda each: (each.ts, -each.dur))
    placed = list(nested(slices, begin))
    assert_nested([{"ts": ns / 1e3, "dur": dur_ns / 1e3} for _, ns, dur_ns in placed])
    assert all(abs(dur_ns / 1e3 - each.dur) < 0.03 for each, _, dur_ns in placed)


def test_the_summary_says_where_time_went(
    traced: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    baton(monkeypatch, str(traced), "--out", str(traced / "t.json"))
    told = capsys.readouterr().out
    [worker] = [line.split() for line in told.splitlines() if line.startswith("decode-0")]
    assert " ".join(worker) == "decode-0 0.0 s 3 9.90 ms 9.90 ms 93% 100.0 us 100.0 us 1 3000.0 us"
    assert "1 requests: 1 finished; 0 replayed" in told
    assert "prefill  10.0 ms  10.0 ms  10.0 ms" in told
    assert f"{REQUEST}  45.0  1.0   2.0     10.0     3.0      30.0    40      9       1" in told
    assert f"events in {traced}/t.json" in told
    read_events(traced / "t.json")


@pytest.mark.parametrize("name", [REQUEST, "cmpl-0123", "mine"])
def test_one_request_is_found_by_each_of_its_names(
    name: str, traced: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert baton(monkeypatch, str(traced), "--request", name) == 0
    out = capsys.readouterr().out
    told, table = out.split("AT ")
    assert told.split()[0] == REQUEST and "decode_worker=decode-0" in told and "e2e_ms" not in table
    assert all(len(line) <= 80 for line in out.splitlines())
    lines = table.splitlines()
    stops = [" ".join(line.split()[4:6]) for line in lines[1:]]
    way = ["router request", "router queued", "decode-0 step", "decode-0 2", "decode-0 collect", "router finish"]
    assert stops == way
    assert not (traced / "trace.json.gz").exists()


def test_of_a_long_trace_the_last_seconds_are_enough(traced: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert baton(monkeypatch, str(traced), "--last-s", "0.0125") == 0
    slices = [e for e in read_events(traced / "trace.json.gz") if e["ph"] == "X"]
    names = ["request", "turn", "step", "wait", "collect", "finish"]
    assert sorted(e["name"] for e in slices) == sorted(names)


def test_a_request_that_nobody_traced_is_an_error(
    traced: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert baton(monkeypatch, str(traced), "--request", "cmpl-9") == 2
    assert f"--request cmpl-9: nothing was traced of it; there is {REQUEST}, for example" in capsys.readouterr().err


def test_what_is_no_event_is_skipped_and_told(
    traced: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = [
        '{"ph":"X","tid":1,"name":"x","ts":NaN,"dur":1}', '{"ph":"X","tid":1,"name":"x","ts":1e8,"dur":-1}',
        "[]", "null", '{"ph":"B"}', '{"ph":"X","tid":"1","name":"x","ts":1,"dur":1}', "[" * 100_000,
        f'{{"ph":"X","tid":1,"name":"x","ts":1{"0" * 400},"dur":1}}', '{"ph":"t","tid":1,"ts":1e20,"id":"x"}',
        '{"ph":"X","tid":1,"name":"x","ts":1,"dur":1,"args":{"x":1e999}}', "x" * MAX_LINE_CHARS,
    ]  # fmt: skip
    append(traced / "router.router.1.jsonl", "".join(f"{text}\n" for text in bad))
    append(traced / "decode.decode-0.1.jsonl", '{"ph":"X","ti')
    (traced / "prefill.prefill-0.1.jsonl").write_text("")
    (traced / "prefill.prefill-1.1.jsonl").write_bytes(b"\xff\x00\n")
    assert baton(monkeypatch, str(traced)) == 0
    told = capsys.readouterr().out
    assert "left out: decode.decode-0.1.jsonl: its last line is cut" in told
    assert "left out: router.router.1.jsonl: 12 lines skipped that are no events, the first is line 7" in told
    assert "prefill.prefill-0.1.jsonl: skipped, as it is empty" in told
    assert "prefill.prefill-1.1.jsonl: skipped, as it does not begin with whose it is" in told
    assert len(slices_of(read_events(traced / "trace.json.gz"), REQUEST)) == 5


@pytest.mark.parametrize(
    "forged", [{"unix_s": "1e400"}, {"epoch": 1e18}, {"pid": None}, {"monotonic_s": -1}, {"id": 3}]
)
def test_a_file_of_nobody_is_left_out(
    forged: dict[str, Any], traced: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = Writer(traced, "decode", "decode-1").path
    header = json.loads(other.read_text())
    other.write_text(json.dumps(header | {"args": header["args"] | forged}) + "\n")
    assert baton(monkeypatch, str(traced)) == 0
    assert "decode.decode-1.1.jsonl: skipped, as it does not begin with whose it is" in capsys.readouterr().out


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
        assert f"left out: {name}.jsonl: skipped: it is " in told
    assert told.count("left out: ") == 4


def test_a_request_without_a_name_is_none(traced: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    router = Writer(traced, "router", "router-1").tracer
    router.slice(FIRST_LANE, "request", 100.0, 100.05, FACTS)
    assert baton(monkeypatch, str(traced)) == 0


def test_parts_of_another_start_of_the_machine_are_put_in_place_by_the_wall_clock(
    traced: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Writer(traced, "decode", "decode-0", 2, boot="other", late_s=90.0)
    other.tracer.slice(LOOP, "turn", 10.06, 10.07)  # of its own clock: 100.06 of the others'
    older = Writer(traced, "decode", "decode-0", 2, boot="other", late_s=90.0)
    older.path.rename(older.path.with_name("decode.decode-0.2.older.jsonl"))
    assert baton(monkeypatch, str(traced)) == 0
    events = read_events(traced / "trace.json.gz")
    assert sorted(names_of(events).values()) == ["decode-0, start 1", "decode-0, start 2", "router"]
    [pid] = [pid for pid, name in names_of(events).items() if name.endswith("2")]
    [turn] = [e for e in events if e["pid"] == pid and e["ph"] == "X"]
    assert turn["ts"] == pytest.approx(60_000, abs=1)


@pytest.mark.parametrize(
    ("name", "message"),
    [("none", "no such directory"), ("empty", r"nothing was traced there (no .jsonl file)")],
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
