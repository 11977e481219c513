"""Where a completion's time goes: waiting here, its prompt, the way to a decode worker, its decode steps."""

from enum import Enum


class Phase(Enum):
    QUEUED = "queued"  # no worker has it yet
    PREFILL = "prefill"  # sent to a worker: until the first token of an attempt
    HANDOFF = "handoff"  # until a decode step has made the next one
    DECODE = "decode"


class PhaseTimes:
    """Seconds in each phase over all attempts; after a replay it is queued and goes through them again."""

    __slots__ = ("current", "seconds", "since_s")

    def __init__(self) -> None:
        self.current: Phase | None = None  # None before the first, and behind the last
        self.since_s = 0.0
        self.seconds: dict[Phase, float] = {}

    def until(self, now_s: float) -> dict[Phase, float]:
        """Return the seconds in each phase, those of the current one so far included."""
        if self.current is None:
            return self.seconds
        return self.seconds | {self.current: self.seconds.get(self.current, 0.0) + now_s - self.since_s}

    def enter(self, phase: Phase | None, now_s: float) -> float:
        """Go to the next phase, or to none; returns the seconds since the last one began."""
        passed_s = now_s - self.since_s
        if self.current is not None:
            self.seconds[self.current] = self.seconds.get(self.current, 0.0) + passed_s
        self.current, self.since_s = phase, now_s
        return passed_s
