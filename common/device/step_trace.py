"""Where a worker's time goes, step by step: a Chrome trace, opened in Perfetto, and a line that sums it up.

Host phases are read from the clock, device times from CUDA events around each step. The loop says the
same things whether it is traced or not; untraced it says them to a `Trace`, which does not listen.
"""

import json
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from common.errors import ConfigError

logger = logging.getLogger(__name__)

MAX_STEPS = 20_000
"""Steps kept, the last ones: about 15 MB of file."""

WAIT = "wait"
"""The phase in which the host has nothing to do but wait for the device."""

_NOTHING = nullcontext()


class Trace:
    """What a loop tells about its steps; this one keeps nothing."""

    def turn(self) -> AbstractContextManager[None]:
        """Around one turn of the loop; turns that neither launch nor wait for a step are not kept."""
        return _NOTHING

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Around a part of a turn; phases may nest."""
        return _NOTHING

    def device(self, size: int, unit: str) -> AbstractContextManager[None]:
        """Around the launch of a step over `size` rows or tokens."""
        return _NOTHING

    def finish(self) -> None:
        """The loop has ended: write what was kept."""


class Event(Protocol):
    """A `torch.cuda.Event` with timing."""

    def record(self) -> Any: ...

    def query(self) -> bool: ...

    def synchronize(self) -> Any: ...

    def elapsed_time(self, later: Any, /) -> float:
        """Milliseconds."""
        ...


@dataclass(frozen=True, slots=True)
class Span:
    """A named stretch of time on one track; seconds on the trace's clock."""

    name: str
    begin_s: float
    end_s: float

    @property
    def us(self) -> float:
        return (self.end_s - self.begin_s) * 1e6


@dataclass(slots=True)
class Turn:
    """One turn of the loop and its phases, inner ones before those around them."""

    begin_s: float
    end_s: float = 0.0
    is_step: bool = False
    phases: list[Span] = field(default_factory=list)

    @property
    def busy_us(self) -> float:
        """Host time without waiting."""
        return (self.end_s - self.begin_s) * 1e6 - sum(phase.us for phase in self.phases if phase.name == WAIT)


@dataclass(frozen=True, slots=True)
class Step:
    """A launched step. `is_ahead`: the device had not finished the step before when this one was launched."""

    name: str
    events: tuple[Event, Event] | None
    is_ahead: bool


@dataclass(frozen=True, slots=True)
class Summary:
    """Of a whole trace; empty lists where there was nothing to measure."""

    num_steps: int
    gaps_us: list[float]  # device idle between a step and one launched before it had ended
    num_late: int  # steps launched when the one before had ended
    busy_us: list[float]  # host, each turn, without waiting

    def __str__(self) -> str:
        parts = [f"{self.num_steps} steps"]
        if self.gaps_us or self.num_late:
            gaps = _percentiles(self.gaps_us)
            parts.append(f"device idle between back-to-back steps {gaps}, {self.num_late} steps not launched ahead")
        parts.append(f"host busy {_percentiles(self.busy_us)} a step")
        return "; ".join(parts)


class StepTrace(Trace):
    """Keeps the last `max_steps` turns and steps.

    Args:
        path: file to write.
        new_event: `timing_events` of the device.
        clock: seconds.
    """

    def __init__(
        self,
        path: Path,
        new_event: Callable[[], Event] | None,
        *,
        max_steps: int = MAX_STEPS,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.path, self.new_event, self.clock = path, new_event, clock
        self.turns: deque[Turn] = deque(maxlen=max_steps)
        self.steps: deque[Step] = deque(maxlen=max_steps)
        self._turn = Turn(clock())
        self._anchor = self._new_anchor()
        self.begin_s = clock()

    @contextmanager
    def turn(self) -> Iterator[None]:
        turn = self._turn = Turn(self.clock())
        yield
        turn.end_s = self.clock()
        if turn.is_step:
            self.turns.append(turn)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        begin_s = self.clock()
        yield
        self._turn.phases.append(Span(name, begin_s, self.clock()))
        self._turn.is_step |= name == WAIT

    @contextmanager
    def device(self, size: int, unit: str) -> Iterator[None]:
        name, self._turn.is_step = f"{size} {unit}", True
        if self.new_event is None:
            yield
            self.steps.append(Step(name, None, is_ahead=False))
            return
        begin, end = self.new_event(), self.new_event()
        begin.record()
        yield
        end.record()
        before = self.steps[-1].events if self.steps else None
        is_ahead = before is not None and not before[1].query()
        self.steps.append(Step(name, (begin, end), is_ahead))

    def finish(self) -> None:
        """Write the file and log the summary; a file that cannot be written is logged, too."""
        device = self.device_spans()
        logger.info("traced %s", self.summary(device))
        try:
            with self.path.open("w", encoding="utf-8") as file:
                file.write('{"traceEvents": [\n')
                file.write(",\n".join(json.dumps(event) for event in self._chrome_events(device)))
                file.write("\n]}\n")
        except OSError as error:
            logger.error("the trace is lost: %s", error)
        else:
            logger.info("trace written to %s, open it at ui.perfetto.dev", self.path)

    def device_spans(self) -> list[Span]:
        """When each step ran on the device, on the host's clock; empty without a device.

        Events know only the time between two of them, in fp32. So steps are chained back from the end
        one by one, and the two clocks are made to agree at the beginning of the trace and at its end.
        """
        timed = [(step.name, *step.events) for step in self.steps if step.events]
        if self._anchor is None or not timed:
            return []
        (first, first_s), (last, last_s) = self._anchor, self._new_anchor() or self._anchor
        rate = (last_s - first_s) / first.elapsed_time(last)  # host seconds a device millisecond
        spans, later, later_s = [], last, last_s
        for name, begin, end in reversed(timed):
            end_s = later_s - end.elapsed_time(later) * rate
            later, later_s = begin, end_s - begin.elapsed_time(end) * rate
            spans.append(Span(name, later_s, end_s))
        return spans[::-1]

    def summary(self, device: list[Span]) -> Summary:
        """`device` is `device_spans()`."""
        gaps_us = [(after.begin_s - before.end_s) * 1e6 for before, after in pairwise(device)]
        ahead = [step.is_ahead for step in self.steps][1:]
        return Summary(
            num_steps=len(self.steps),
            gaps_us=[gap_us for gap_us, is_ahead in zip(gaps_us, ahead, strict=False) if is_ahead],
            num_late=ahead.count(False) if device else 0,
            busy_us=[turn.busy_us for turn in self.turns],
        )

    def _new_anchor(self) -> tuple[Event, float] | None:
        """One moment on both clocks: an event, and the time when the host saw that it was over."""
        if self.new_event is None:
            return None
        event = self.new_event()
        event.record()
        event.synchronize()
        return event, self.clock()

    def _chrome_events(self, device: list[Span]) -> Iterator[dict[str, Any]]:
        """Two tracks, each in order of time, a span before those inside it."""
        for track, name in ((0, "host"), (1, "device")):
            yield {"ph": "M", "pid": 0, "tid": track, "name": "thread_name", "args": {"name": name}}
        for turn in self.turns:
            spans = [*turn.phases, Span("turn", turn.begin_s, turn.end_s)][::-1]
            yield from (self._complete(0, span) for span in sorted(spans, key=lambda span: span.begin_s))
        yield from (self._complete(1, span) for span in device)

    def _complete(self, track: int, span: Span) -> dict[str, Any]:
        begin_us = round((span.begin_s - self.begin_s) * 1e6, 3)
        return {"ph": "X", "pid": 0, "tid": track, "name": span.name, "ts": begin_us, "dur": round(span.us, 3)}


def make_trace(path: str, worker_id: str, device: torch.device) -> Trace:
    """The trace that `worker.trace_file` asks for, if any; the worker's id goes before the suffix.

    So several workers may have the same setting. Raises ConfigError if there is no such directory.
    """
    if not path:
        return Trace()
    target = Path(path)
    target = target.with_name(f"{target.stem}-{worker_id}{target.suffix}")
    if not target.parent.is_dir():
        raise ConfigError(f"worker.trace_file = {path!r}: {target.parent} is no directory; make it or name another")
    return StepTrace(target, timing_events(device))


def timing_events(device: torch.device) -> Callable[[], Event] | None:
    """What makes timing events on a device; None for a CPU."""
    return partial(torch.cuda.Event, enable_timing=True) if device.type == "cuda" else None


def _percentiles(values_us: list[float]) -> str:
    if not values_us:
        return "not measured"
    p50, p99 = np.percentile(values_us, (50, 99))
    return f"p50 {p50:.1f} us, p99 {p99:.1f} us"
