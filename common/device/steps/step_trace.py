"""Timing of a worker's steps: slices of a trace, and a summary line.

Host phases are read from the clock, device times from CUDA events around each step. The loop makes the same calls
without tracing (see `loop_trace`).
"""

import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from common.base.trace_events import DEVICE, LOOP, Args, Key, Tracer, shown
from common.base.trace_file import Process, TraceFile
from common.device.steps.loop_trace import WAIT, Trace
from common.settings.observation_sections import TraceSection

logger = logging.getLogger(__name__)

MAX_STEPS = 20_000
"""Number of latest steps in the summary."""
ANCHOR_S, OLDEST_ANCHOR_S = 1.0, 10.0
"""Seconds between comparisons of host and device clocks; slow comparisons count only after the second."""
MAX_ANCHOR_S = 100e-6


class Event(Protocol):
    """The interface of a `torch.cuda.Event` with timing."""

    def record(self) -> Any: ...

    def query(self) -> bool: ...

    def elapsed_time(self, later: Any, /) -> float:
        """Return milliseconds."""
        ...


class Timer(Protocol):
    """The clock of a device."""

    def event(self) -> Event:
        """Make an event, to be recorded in the stream of device work."""
        ...

    def moment(self) -> Event:
        """Return an event that the device met during the call, independently of running work."""
        ...


class CudaTimer:
    """The clock of a GPU; moments are recorded on a separate stream."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device, priority=-1)

    def event(self) -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=True)

    def moment(self) -> torch.cuda.Event:
        event = self.event()
        event.record(self._stream)
        event.synchronize()
        return event


class Slice(NamedTuple):
    """A phase of a turn, in seconds on the trace's clock."""

    name: str
    begin_s: float
    end_s: float
    args: Args | None


@dataclass(slots=True)
class Turn:
    """A turn of the loop with phases."""

    begin_s: float
    is_kept: bool = False
    phases: list[Slice] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Launched:
    """A launched step. `is_ahead`: launched before the device had finished the previous step."""

    args: Args
    begin: Event
    end: Event
    is_ahead: bool


def _last() -> deque[float]:
    return deque(maxlen=MAX_STEPS)


@dataclass(slots=True)
class Summary:
    """Times of the last steps; empty where nothing was measured."""

    num_steps: int = 0
    num_late: int = 0  # steps launched after the previous step had ended
    gaps_us: deque[float] = field(default_factory=_last)  # device idle before a step launched ahead
    intervals_us: deque[float] = field(default_factory=_last)  # between beginnings of steps on the device
    busy_us: deque[float] = field(default_factory=_last)  # host time of each turn, without waits
    phases_us: dict[str, deque[float]] = field(default_factory=lambda: defaultdict(_last))

    def __str__(self) -> str:
        parts = [f"{self.num_steps} steps"]
        if self.gaps_us or self.num_late:
            gaps = _percentiles(self.gaps_us)
            parts.append(f"device idle between back-to-back steps {gaps}, {self.num_late} steps not launched ahead")
        parts.append(f"host busy {_percentiles(self.busy_us)} a step")
        return "; ".join(parts)


class StepTrace(Trace):
    """Trace that writes turns and steps as slices.

    Args:
        tracer: writer of the process's events.
        timer: clock of the device; None for a CPU, whose steps are phases of the host.
        close: called at the end.
        clock: seconds, as `time.monotonic`.
    """

    def __init__(
        self,
        tracer: Tracer,
        timer: Timer | None,
        *,
        close: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tracer, self.timer, self.clock, self._close = tracer, timer, clock, close
        self.summary = Summary()
        self._turn = Turn(clock())
        self._joining: list[Key] = []
        self._phase_args: dict[str, Any] = {}  # for the phase that ends next
        self._launched: deque[Launched] = deque()
        self._before: Launched | None = None  # last step seen finished
        self._anchor: tuple[Event, float] | None = None
        self._device_s = 0.0  # end of the device's last slice

    @contextmanager
    def turn(self) -> Iterator[None]:
        self._turn = Turn(self.clock())
        yield
        if self._turn.is_kept:
            self._write_turn(self._turn, self.clock())
        if self._launched:
            self._follow_device()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        begin_s = self.clock()
        yield
        args, self._phase_args = self._phase_args, {}
        self._turn.phases.append(Slice(name, begin_s, self.clock(), args))
        self._turn.is_kept |= name == WAIT

    @contextmanager
    def device(self, size: int, unit: str) -> Iterator[None]:
        args: dict[str, Any] = {unit: size}
        if self._joining:
            args["requests"] = [shown(key) for key in self._joining]
        self._joining = []
        self._turn.is_kept = True
        self.summary.num_steps += 1
        if self.timer is None:
            self._phase_args = args
            yield
            return
        begin, end = self.timer.event(), self.timer.event()
        begin.record()
        yield
        end.record()
        before = self._launched[-1] if self._launched else None
        is_ahead = before is not None and not before.end.query()
        self.summary.num_late += not is_ahead and (before or self._before) is not None
        self._launched.append(Launched(args, begin, end, is_ahead))

    def join(self, keys: Iterable[Key]) -> None:
        self._joining += keys

    def finish(self) -> None:
        self._follow_device()
        logger.info("traced %s", self.summary)
        self._close()

    # --- inside ---------------------------------------------------------------------------------

    def _write_turn(self, turn: Turn, end_s: float) -> None:
        waited_s = 0.0
        self.tracer.slice(LOOP, "turn", turn.begin_s, end_s)
        for phase in reversed(turn.phases):  # inner phases after outer phases, even of equal length
            self.tracer.slice(LOOP, *phase)
            took_s = phase.end_s - phase.begin_s
            waited_s += took_s if phase.name == WAIT else 0.0
            self.summary.phases_us[phase.name].append(took_s * 1e6)
        self.summary.busy_us.append((end_s - turn.begin_s - waited_s) * 1e6)

    def _follow_device(self) -> None:
        """Write finished steps; device errors are only logged, because the worker's own calls fail too."""
        try:
            while self._launched and self._launched[0].end.query():
                self._write_step(self._launched.popleft())
        except RuntimeError as error:
            logger.warning("steps of the device are traced no more: %s", error)
            self._launched.clear()
            self.timer = None

    def _write_step(self, step: Launched) -> None:
        took_ms = step.begin.elapsed_time(step.end)
        begin_s = self._host_s(step.begin)
        if self._before is not None:
            self.summary.intervals_us.append(self._before.begin.elapsed_time(step.begin) * 1e3)
        if self._before is not None and step.is_ahead:
            self.summary.gaps_us.append(self._before.end.elapsed_time(step.begin) * 1e3)
        begin_s = max(begin_s, self._device_s)  # steps do not overlap, but clock comparisons err by microseconds
        self._device_s = begin_s + took_ms / 1e3
        args = step.args if step.is_ahead else {**step.args, "late": True}
        self.tracer.slice(DEVICE, "step", begin_s, self._device_s, args)
        self._before = step

    def _host_s(self, event: Event) -> float:
        """Convert an event to host time, from the last comparison of the two clocks."""
        assert self.timer is not None, "it was recorded"
        age_s = self.clock() - self._anchor[1] if self._anchor else OLDEST_ANCHOR_S
        if age_s >= ANCHOR_S:
            begin_s = self.clock()
            moment = self.timer.moment()
            end_s = self.clock()
            if end_s - begin_s <= MAX_ANCHOR_S or age_s >= OLDEST_ANCHOR_S:
                self._anchor = moment, end_s
        assert self._anchor is not None, "the first counts, however long it took"
        moment, moment_s = self._anchor
        return moment_s + moment.elapsed_time(event) / 1e3


def make_trace(section: TraceSection, process: Process, device: torch.device) -> Trace:
    """Make the configured trace, if any; raises ConfigError if the directory cannot be written."""
    if not section.dir:
        return Trace()
    file = TraceFile(Path(section.dir), process, section.max_bytes)
    return StepTrace(Tracer(file.write), device_timer(device), close=file.close)


def device_timer(device: torch.device) -> Timer | None:
    """Return the clock of a GPU; None for a CPU."""
    return CudaTimer(device) if device.type == "cuda" else None


def _percentiles(values_us: Iterable[float]) -> str:
    values = list(values_us)
    if not values:
        return "not measured"
    p50, p99 = np.percentile(values, (50, 99))
    return f"p50 {p50:.1f} us, p99 {p99:.1f} us"
