"""Phases of a completion: the router's queue, the prompt, the handoff to a decode worker, and decode steps."""

from enum import Enum


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
