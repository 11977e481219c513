"""Phases of a completion: times in each, and reports of each to a watcher."""

from collections.abc import Callable, Mapping
from enum import Enum
from typing import NamedTuple, Protocol, TypedDict

from common.base.json_file import Json
from router.placement.route import Route


class Phase(Enum):
    QUEUED = "queued"  # no worker has the completion yet
    PREFILL = "prefill"  # sent to a worker: until the first token of an attempt
    HANDOFF = "handoff"  # until a decode step has made the next token
    DECODE = "decode"


class PhaseTimes:
    """Seconds in each phase over all attempts; a replayed completion is queued again and repeats the phases."""

    __slots__ = ("current", "seconds", "since_s")

    def __init__(self) -> None:
        self.current: Phase | None = None  # None before the first, and after the last
        self.since_s = 0.0
        self.seconds: dict[Phase, float] = {}

    def until(self, now_s: float) -> dict[Phase, float]:
        """Return the seconds in each phase, including the current phase until `now_s`."""
        if self.current is None:
            return self.seconds
        return self.seconds | {self.current: self.seconds.get(self.current, 0.0) + now_s - self.since_s}

    def enter(self, phase: Phase | None, now_s: float) -> float:
        """Go to the next phase, or to none; return the seconds since the last phase began."""
        passed_s = now_s - self.since_s
        if self.current is not None:
            self.seconds[self.current] = self.seconds.get(self.current, 0.0) + passed_s
        self.current, self.since_s = phase, now_s
        return passed_s


class Timing(TypedDict):
    """Times and places of a completion, as logged."""

    index: int
    attempts: int  # times the completion was sent to workers
    read_ms: float  # receiving, checking and tokenizing the request
    queued_ms: float
    prefill_ms: float
    handoff_ms: float
    decode_ms: float
    ttft_ms: float | None  # from the beginning of queueing, like `e2e_ms`
    e2e_ms: float
    cached_tokens: int
    prefill_worker: str | None
    decode_worker: str | None
    kv_path: str | None  # transport of the KV blocks
    route: str  # reason for the choice of workers


class Arrival(NamedTuple):
    """Times at which an HTTP request came in; seconds of the dispatcher's clock."""

    received_s: float  # first byte
    body_s: float  # whole body
    read_s: float  # prompts as tokens


class Leg(NamedTuple):
    """The stay in a phase of an attempt."""

    phase: Phase
    begin_s: float
    attempt: int
    route: Route | None  # None in the queue


class End(NamedTuple):
    """The end of a completion. `facts` are those of the log: sizes, times and names, never text."""

    now_s: float
    facts: Mapping[str, Json]


class Watcher(Protocol):
    """A listener to the phases of a completion."""

    def left(self, leg: Leg, end_s: float) -> None: ...

    def ended(self, end: End) -> None: ...


Watch = Callable[[int], Watcher | None]
"""Returns the watcher of a choice of an HTTP request, by index."""


def no_watch(index: int) -> Watcher | None:
    """Return None: no watcher for any choice."""
    return None


class Journey:
    """Reports the phases of a completion to a watcher."""

    __slots__ = ("_leg", "_watcher")

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self._leg: Leg | None = None

    def enter(self, phase: Phase, now_s: float, attempt: int, route: Route | None) -> None:
        """Leave the current phase and begin `phase`."""
        self._leave(now_s)
        self._leg = Leg(phase, now_s, attempt, route)

    def end(self, end: End) -> None:
        self._leave(end.now_s)
        self._watcher.ended(end)

    def _leave(self, now_s: float) -> None:
        leg, self._leg = self._leg, None
        if leg is not None:
            self._watcher.left(leg, now_s)
