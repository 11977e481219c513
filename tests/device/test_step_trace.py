import logging
from collections import deque
from pathlib import Path

import pytest
import torch

from common.device.step_trace import WAIT, StepTrace, Trace, make_trace
from common.errors import ConfigError
from tests.traces import read_trace


class Machine:
    """A host clock that the test moves, and a device that reaches events when the test says so."""

    def __init__(self) -> None:
        self.now_us = 5e6
        self.reached_us: deque[float] = deque()

    def clock(self) -> float:
        return self.now_us / 1e6

    def pass_us(self, us: float) -> None:
        self.now_us += us

    def new_event(self) -> "Reached":
        return Reached(self)


class Reached:
    """An event; the device's clock has another zero and runs at half the host's rate."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.at_us = 0.0

    def record(self) -> None:
        self.at_us = self.machine.reached_us.popleft() if self.machine.reached_us else self.machine.now_us

    def query(self) -> bool:
        return self.machine.now_us >= self.at_us

    def synchronize(self) -> None:
        assert self.query()

    def elapsed_time(self, later: "Reached", /) -> float:
        return (later.at_us - self.at_us) / 1e3 / 2


@pytest.fixture
def machine() -> Machine:
    return Machine()


def traced(machine: Machine, path: Path) -> StepTrace:
    """Three steps: the second launched ahead, idle 4 us before it; the third launched late."""
    trace = StepTrace(path, machine.new_event, clock=machine.clock)
    start_us = machine.now_us
    for launch_us, begin_us, end_us in ((0, 10, 110), (50, 114, 210), (300, 320, 420)):
        machine.now_us = start_us + launch_us
        machine.reached_us += [start_us + begin_us, start_us + end_us]
        with trace.turn():
            with trace.phase("launch"), trace.device(8, "rows"):
                machine.pass_us(5)
            with trace.phase("collect"):
                machine.pass_us(1)
                with trace.phase(WAIT):
                    machine.pass_us(30)
                machine.pass_us(2)
    machine.now_us = start_us + 1000
    return trace


def test_the_summary_of_a_synthetic_trace_is_right(machine: Machine, tmp_path: Path) -> None:
    trace = traced(machine, tmp_path / "trace.json")
    summary = trace.summary(trace.device_spans())
    assert summary.num_steps == 3
    assert summary.gaps_us == pytest.approx([4.0])
    assert summary.num_late == 1
    assert summary.busy_us == pytest.approx([8.0] * 3)
    assert "p50 4.0 us, p99 4.0 us, 1 steps not launched ahead; host busy p50 8.0 us" in str(summary)


def test_device_times_are_on_the_hosts_clock(machine: Machine, tmp_path: Path) -> None:
    start_s = machine.clock()
    spans = traced(machine, tmp_path / "trace.json").device_spans()
    begins = [round((span.begin_s - start_s) * 1e6, 3) for span in spans]
    assert begins == [10, 114, 320]
    assert [span.us for span in spans] == pytest.approx([100, 96, 100])


def test_the_file_has_two_tracks_in_order_whose_spans_nest(machine: Machine, tmp_path: Path) -> None:
    trace = traced(machine, tmp_path / "trace.json")
    trace.finish()
    host, device = read_trace(tmp_path / "trace.json")
    assert [e["name"] for e in host] == ["turn", "launch", "collect", "wait"] * 3
    assert [(e["name"], e["ts"], e["dur"]) for e in device] == [
        ("8 rows", 10, 100), ("8 rows", 114, 96), ("8 rows", 320, 100)
    ]  # fmt: skip


def test_turns_without_a_step_are_not_kept(machine: Machine, tmp_path: Path) -> None:
    trace = StepTrace(tmp_path / "trace.json", None, clock=machine.clock)
    with trace.turn(), trace.phase("receive"):
        machine.pass_us(7)
    with trace.turn(), trace.phase("collect"), trace.phase(WAIT):
        machine.pass_us(9)
    with trace.turn(), trace.device(3, "tokens"):
        machine.pass_us(11)
    assert [turn.busy_us for turn in trace.turns] == pytest.approx([0, 11])
    assert trace.device_spans() == []
    assert str(trace.summary([])) == "1 steps; host busy p50 5.5 us, p99 10.9 us a step"


def test_only_the_last_steps_are_kept(machine: Machine, tmp_path: Path) -> None:
    trace = StepTrace(tmp_path / "trace.json", machine.new_event, max_steps=2, clock=machine.clock)
    for size in range(5):
        with trace.turn(), trace.device(size, "rows"):
            machine.pass_us(10)
        machine.pass_us(3)
    spans = trace.device_spans()
    assert [span.name for span in spans] == ["3 rows", "4 rows"]
    assert len(trace.turns) == 2
    assert [span.begin_s for span in spans] == pytest.approx([5.000039, 5.000052])


def test_a_lost_file_is_logged(machine: Machine, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        traced(machine, tmp_path).finish()
    assert "traced 3 steps" in caplog.text
    assert "the trace is lost" in caplog.text


def test_the_workers_id_goes_before_the_suffix(tmp_path: Path) -> None:
    trace = make_trace(str(tmp_path / "trace.json"), "decode-0", torch.device("cpu"))
    assert isinstance(trace, StepTrace)
    assert trace.path == tmp_path / "trace-decode-0.json"


def test_no_setting_no_trace() -> None:
    assert type(make_trace("", "decode-0", torch.device("cpu"))) is Trace


def test_a_directory_that_is_missing_is_a_wrong_setting(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="make it or name another"):
        make_trace(str(tmp_path / "none" / "trace.json"), "decode-0", torch.device("cpu"))
