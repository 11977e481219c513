import json
import logging
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

from common.base.errors import ConfigError
from common.base.trace_events import DEVICE, LOOP, Key, Tracer
from common.base.trace_file import Process
from common.device.engine.gpu_share import limited_stream
from common.device.steps import step_trace
from common.device.steps.loop_trace import WAIT, Trace
from common.device.steps.step_trace import StepTrace, device_timer, make_trace
from common.settings.observation_sections import TraceSection

Event = dict[str, Any]
DECODE = Process("decode", "decode-0", 1)
CLOCKS_US = 200.0
"""To which those of host and GPU surely agree."""


class Machine:
    """A host clock that the test moves, and a device that reaches events when the test says so."""

    def __init__(self) -> None:
        self.now_us = 5e6
        self.reached_us: deque[float] = deque()
        self.num_moments = 0

    def clock(self) -> float:
        return self.now_us / 1e6

    def pass_us(self, us: float) -> None:
        self.now_us += us

    def event(self) -> "Reached":
        return Reached(self)

    def moment(self) -> "Reached":
        self.num_moments += 1
        event = Reached(self)
        event.at_us = self.now_us
        return event


class Reached:
    """An event; where the device's clock begins nobody knows."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.at_us = 0.0

    def record(self) -> None:
        self.at_us = self.machine.reached_us.popleft() if self.machine.reached_us else self.machine.now_us

    def query(self) -> bool:
        return self.machine.now_us >= self.at_us

    def elapsed_time(self, later: "Reached", /) -> float:
        return (later.at_us - self.at_us) / 1e3


@pytest.fixture
def machine() -> Machine:
    return Machine()


class Traced:
    """A trace, and what it wrote."""

    def __init__(self, machine: Machine, *, has_device: bool = True) -> None:
        self.machine, self.begin_us, self.lines = machine, machine.now_us, list[str]()
        self.trace = StepTrace(Tracer(self.lines.append), machine if has_device else None, clock=machine.clock)

    def events(self, track: int) -> list[Event]:
        """In order of time in microseconds from the beginning, a slice before those inside it."""
        mine = [e for e in map(json.loads, self.lines) if e["track"] == track]
        for each in mine:
            each["ts"], each["dur"] = each["begin_ns"] / 1e3 - self.begin_us, each["dur_ns"] / 1e3
        return sorted(mine, key=lambda e: (e["ts"], -e["dur"]))


@pytest.fixture
def traced(machine: Machine) -> Traced:
    """Three steps: the second launched ahead, idle 4 us before it; the third launched late."""
    traced = Traced(machine)
    trace, start_us = traced.trace, machine.now_us
    for launch_us, begin_us, end_us in ((0, 10, 110), (50, 114, 210), (300, 320, 420)):
        machine.now_us = start_us + launch_us
        with trace.turn():
            with trace.phase("launch"):
                trace.join([(f"cmpl-{launch_us}", 1)])
                machine.reached_us.extend([start_us + begin_us, start_us + end_us])
                with trace.device(8, "rows"):
                    machine.pass_us(5)
            with trace.phase("collect"):
                machine.pass_us(3)
                with trace.phase(WAIT):
                    machine.pass_us(2)
    machine.now_us = start_us + 430
    trace.finish()
    return traced


def test_the_device_is_idle_between_back_to_back_steps_only(traced: Traced) -> None:
    summary = traced.trace.summary
    assert summary.num_steps == 3
    assert list(summary.gaps_us) == pytest.approx([4.0])
    assert list(summary.intervals_us) == pytest.approx([104.0, 206.0])
    assert summary.num_late == 1
    assert list(summary.busy_us) == pytest.approx([8.0] * 3)
    assert list(summary.phases_us["collect"]) == pytest.approx([5.0] * 3)
    assert "p50 4.0 us, p99 4.0 us, 1 steps not launched ahead; host busy p50 8.0 us" in str(summary)


def test_steps_of_the_device_are_on_the_hosts_clock_with_the_requests_that_joined(traced: Traced) -> None:
    steps = traced.events(DEVICE)
    assert [(e["ts"], e["dur"]) for e in steps] == [(10, 100), (114, 96), (320, 100)]
    assert [e["args"] for e in steps] == [
        {"rows": 8, "requests": ["cmpl-0#1"], "late": True},
        {"rows": 8, "requests": ["cmpl-50#1"]},
        {"rows": 8, "requests": ["cmpl-300#1"], "late": True},
    ]


def test_phases_nest_in_their_turn(traced: Traced) -> None:
    assert [e["name"] for e in traced.events(LOOP)] == ["turn", "launch", "collect", "wait"] * 3


def test_clocks_are_compared_once_a_second_and_steps_never_overlap(machine: Machine) -> None:
    traced = Traced(machine)
    for _ in range(30):
        with traced.trace.turn(), traced.trace.device(1, "rows"):
            machine.pass_us(100_000)
    traced.trace.finish()
    assert 3 <= machine.num_moments <= 4
    ends = 0.0
    for step in traced.events(DEVICE):
        assert step["ts"] >= ends
        ends = step["ts"] + step["dur"]


def test_a_comparison_that_took_long_does_not_count_until_there_is_no_other(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow() -> Reached:
        machine.pass_us(300)
        return Machine.moment(machine)

    traced = Traced(machine)
    trace = traced.trace
    for step in range(4):
        if step == 1:
            monkeypatch.setattr(machine, "moment", slow)
        with trace.turn(), trace.device(1, "rows"):
            machine.pass_us(4_000_000)
        anchor = trace._anchor
        assert anchor is not None
        assert (anchor[1] - traced.begin_us / 1e6 > 10) == (step == 3)


def test_a_device_that_fails_ends_its_steps_and_not_the_loop(
    traced: Traced, machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fault(self: Reached) -> bool:
        raise RuntimeError("CUDA error: unspecified launch failure")

    before = len(traced.events(DEVICE))
    with traced.trace.turn(), traced.trace.device(8, "rows"):
        machine.pass_us(5)
        monkeypatch.setattr(Reached, "query", fault)
    with traced.trace.turn(), traced.trace.phase("launch"), traced.trace.device(8, "rows"):
        machine.pass_us(5)
    assert len(traced.events(DEVICE)) == before
    assert "steps of the device are traced no more: CUDA error" in caplog.text
    assert traced.events(LOOP)[-1]["args"] == {"rows": 8}, "as on a CPU"


def test_without_a_device_a_step_is_the_phase_that_launches_it(machine: Machine) -> None:
    traced = Traced(machine, has_device=False)
    trace = traced.trace
    trace.join([("cmpl-1", 0), ("cmpl-2", 3)])
    with trace.turn(), trace.phase("launch"), trace.device(3, "tokens"):
        machine.pass_us(11)
    _, launch = traced.events(LOOP)
    assert launch["args"] == {"tokens": 3, "requests": ["cmpl-1#0", "cmpl-2#3"]}
    assert str(trace.summary) == "1 steps; host busy p50 11.0 us, p99 11.0 us a step"


def test_turns_in_which_nothing_happens_are_not_kept(machine: Machine) -> None:
    traced = Traced(machine, has_device=False)
    with traced.trace.turn(), traced.trace.phase("receive"):
        machine.pass_us(7)
    assert not traced.lines
    with traced.trace.turn(), traced.trace.phase("collect"), traced.trace.phase(WAIT):
        machine.pass_us(9)
    assert [e["name"] for e in traced.events(LOOP)] == ["turn", "collect", "wait"]


def test_it_sums_up_the_last_steps(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_trace, "MAX_STEPS", 2)
    traced = Traced(machine, has_device=False)
    for us in (1, 2, 3):
        with traced.trace.turn(), traced.trace.phase("launch"), traced.trace.device(1, "rows"):
            machine.pass_us(us)
    assert list(traced.trace.summary.busy_us) == pytest.approx([2, 3])
    assert traced.trace.summary.num_steps == 3


def test_at_the_end_the_file_is_written_and_the_log_sums_it_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trace = make_trace(TraceSection(dir=str(tmp_path)), DECODE, torch.device("cpu"))
    with trace.turn(), trace.device(1, "rows"):
        pass
    with caplog.at_level(logging.INFO):
        trace.finish()
    assert "traced 1 steps" in caplog.text
    assert '"name":"turn"' in (tmp_path / "decode.decode-0.1.jsonl").read_text()


@pytest.mark.gpu
@pytest.mark.parametrize("share", [False, True], ids=["whole GPU", "green context"])
def test_steps_of_a_gpu_lie_between_their_launch_and_when_the_host_sees_their_end(share: bool, tmp_path: Path) -> None:
    device = torch.device("cuda:0")
    stream = limited_stream(16, device) if share else torch.cuda.current_stream(device)
    lines: list[str] = []
    trace = StepTrace(Tracer(lines.append), device_timer(device))
    seen: list[tuple[float, float]] = []
    for _ in range(5):
        with trace.turn(), torch.cuda.stream(stream):
            begin_s = trace.clock()
            with trace.device(1, "rows"):
                torch.cuda._sleep(20_000_000)
            stream.synchronize()
            seen.append((begin_s, trace.clock()))
    trace.finish()
    steps = [e for e in map(json.loads, lines) if e["track"] == DEVICE]
    assert len(steps) == len(seen)
    for step, (begin_s, end_s) in zip(steps, seen, strict=True):
        begin_us, dur_us = step["begin_ns"] / 1e3, step["dur_ns"] / 1e3
        assert dur_us > 2_000, "twenty million cycles"
        assert begin_s * 1e6 - CLOCKS_US <= begin_us
        assert begin_us + dur_us <= end_s * 1e6 + CLOCKS_US


def test_untraced_nothing_is_made_kept_or_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def made(*_: object, **__: object) -> None:
        raise AssertionError("no event or stream of the device, and no file")

    for name in ("Event", "Stream"):
        monkeypatch.setattr(torch.cuda, name, made)
    monkeypatch.setattr(step_trace, "TraceFile", made)
    trace = make_trace(TraceSection(), DECODE, torch.device("cuda:0"))
    assert type(trace) is Trace

    def keys() -> Iterator[Key]:
        raise AssertionError("nobody asks who joins")
        yield ("", 0)

    around: list[AbstractContextManager[None]] = [trace.turn(), trace.phase(WAIT), trace.device(8, "rows")]
    assert len({id(each) for each in around}) == 1, "one for all"
    trace.join(keys())
    trace.finish()
    assert not vars(trace)


def test_a_directory_that_is_a_file_is_a_wrong_setting(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"trace\.dir"):
        make_trace(TraceSection(dir=str(tmp_path / "file")), DECODE, torch.device("cpu"))
