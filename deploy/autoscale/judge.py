"""Time of role changes: a shift must persist, and a pause follows each change.

The caller provides the clock. A change that soon undoes the last change doubles the pause, so a flapping load cannot
restart workers all the time. A failed change has a separate pause, doubled each time. The pause applies even with a
cooldown of 0, because a failure is likely to repeat at once.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from common.wire.messages.worker import Role
from deploy.autoscale.load import Sample, Window, measured
from deploy.autoscale.proposal import Machine, Proposal, propose

NUM_WINDOWS = 3
"""Consecutive windows that must agree."""
SOON = 4
"""Pauses after a change within which an opposite change counts as flapping."""
LEAST_RETRY_S = 60.0
"""Shortest pause after a failed change, in seconds."""
LONGEST_PAUSE_S = 3600.0
"""Longest doubled pause in seconds, unless the cooldown is longer."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Length of a window, and of the pause after a change, in seconds."""

    window_s: float = 10.0
    cooldown_s: float = 120.0


class Judge:
    """Receiver of samples, about one a second; proposes role changes."""

    def __init__(self, pace: Pace, machine: Machine) -> None:
        self._pace, self._machine = pace, machine
        self._samples: list[Sample] = []  # samples of the current window
        self._windows: deque[Window] = deque(maxlen=NUM_WINDOWS)
        self._pause_s = pace.cooldown_s  # pause after a successful change
        self._retry_s = 0.0  # pause after a failed change; 0: the last succeeded
        self._ended_s = float("-inf")  # end of the last change
        self._last_role: Role | None = None

    def add(self, sample: Sample | None, ours: Mapping[str, object]) -> Proposal | None:
        """Add a sample; return a due change, if any.

        Args:
            sample: None if the router did not answer.
            ours: names of all workers run here, without standbys.
        """
        if sample is None or not sample.is_complete(ours):
            self._forget()  # figures of fewer workers are not comparable
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
        return propose(self._windows, sample.serving, ours, self._machine)

    def ended(self, now_s: float, role: Role, *, done: bool) -> float:
        """Note the end of a change to `role`, done or failed; return the following pause, in seconds."""
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
