"""When a worker changes its role: a shift has to persist, and after each change there is a pause.

The clock is whoever calls. A change that undoes the last one soon doubles the pause, so that no load, however it flaps,
has workers restarted all the time. After one that failed there is a pause of its own, twice as long each time: also
where none is wanted between changes that do well, as what failed is likely to fail again at once.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from common.wire.messages.worker import Role
from deploy.autoscale.load import Sample, Window, measured
from deploy.autoscale.proposal import Machine, Proposal, propose, seats_of

NUM_WINDOWS = 3
"""In a row, that have to agree."""
SOON = 4
"""Within so many pauses of the last change another one undoes it soon."""
LEAST_RETRY_S = 60.0
"""After a change that failed."""
LONGEST_PAUSE_S = 3600.0
"""Unless the pause itself is longer."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How long a window is, and how long the pause after a change, in seconds."""

    window_s: float = 10.0
    cooldown_s: float = 120.0


class Judge:
    """Takes samples as they come, one a second or so, and says when somebody should change."""

    def __init__(self, pace: Pace, machine: Machine) -> None:
        self._pace, self._machine = pace, machine
        self._samples: list[Sample] = []  # of the window that is not over
        self._windows: deque[Window] = deque(maxlen=NUM_WINDOWS)
        self._pause_s = pace.cooldown_s  # after a change that was done
        self._retry_s = 0.0  # after the last one, if it failed
        self._ended_s = float("-inf")  # the last change
        self._last_role: Role | None = None

    def heed(self, sample: Sample | None, ours: Mapping[str, object]) -> Proposal | None:
        """The change that is due, if there is one.

        Args:
            sample: None if the router said nothing.
            ours: names of all workers that we run, standbys not among them.
        """
        if sample is None or not sample.is_complete(ours):
            self._forget()  # somebody is starting, or dead: figures of fewer are not figures of all
            return None
        if self._samples and self._samples[-1].crew != sample.crew:
            self._forget()
        self._samples.append(sample)
        if sample.at_s - self._samples[0].at_s < self._pace.window_s:
            return None
        self._windows.append(measured(self._samples))
        self._samples = [sample]
        if len(self._windows) < NUM_WINDOWS or sample.at_s - self._ended_s < max(self._pause_s, self._retry_s):
            return None
        return propose(self._windows, seats_of(sample, ours), self._machine)

    def ended(self, now_s: float, role: Role, *, done: bool) -> float:
        """A change to `role` is over, or given up; returns the pause that follows, in seconds."""
        longest_s = max(LONGEST_PAUSE_S, self._pace.cooldown_s)
        is_soon = now_s - self._ended_s < SOON * self._pause_s
        if not done:
            self._retry_s = min(max(2 * self._pause_s, 2 * self._retry_s, LEAST_RETRY_S), longest_s)
        elif is_soon and self._last_role not in (None, role):
            self._pause_s = min(2 * self._pause_s, longest_s)
        elif not is_soon:
            self._pause_s = self._pace.cooldown_s
        self._ended_s = now_s
        if done:
            self._retry_s, self._last_role = 0.0, role
        self._forget()
        return max(self._pause_s, self._retry_s)

    def _forget(self) -> None:
        self._samples.clear()
        self._windows.clear()
