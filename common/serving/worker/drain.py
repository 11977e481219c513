"""Orderly shutdown: the first signal asks to finish owned work, the second to stop at once.

A starting worker owns nothing, so the first signal ends the start.
"""

import logging
import signal
import time
from types import FrameType

logger = logging.getLogger(__name__)


class Drain:
    """State of a worker's shutdown: requested, begun, and its deadline."""

    def __init__(self, drain_s: float) -> None:
        self.drain_s = drain_s
        self.has_started = False  # the worker may own work
        self.has_failed = False  # the start has ended with an error, and the process ends
        self.asked = False
        self.at_once = False
        self.reason = ""  # cause of the shutdown, for the farewell
        self._level = logging.INFO
        self._begun = False
        self._deadline_s = 0.0

    def install(self) -> None:
        """Listen to SIGTERM and SIGINT; call from the main thread."""
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)

    def ask(self, reason: str, *, at_once: bool = False) -> None:
        """Ask for a shutdown like a first signal, or like a second with `at_once`; callable from any thread.

        A repeated request changes nothing.
        """
        if self.asked and self.at_once >= at_once:
            return
        self.reason, self._level = reason, logging.WARNING
        self.asked, self.at_once = True, self.at_once or at_once

    def begins(self) -> bool:
        """Return True exactly once, after a shutdown was requested."""
        if not self.asked or self._begun:
            return False
        self._begun = True
        self._deadline_s = time.monotonic() + self.drain_s
        logger.log(self._level, "%s: taking nothing new, finishing what is here for at most %.0f s",
                   self.reason, self.drain_s)  # fmt: skip
        return True

    def finished(self, owns_something: bool) -> bool:
        """Tell whether the loop ends now."""
        elsewhere = "; what is here goes on elsewhere" if owns_something else ""
        if self.at_once:
            logger.warning("%s: leaving at once%s", self.reason, elsewhere)
            return True
        is_late = self._begun and time.monotonic() > self._deadline_s
        if is_late and owns_something:
            logger.warning("not all is finished after %.0f s%s", self.drain_s, elsewhere)
        return self._begun and (is_late or not owns_something)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.has_failed:
            return  # an exception would be a traceback of whatever the interpreter ends with
        if not self.has_started:
            logger.info("stopping before the start is complete")
            raise SystemExit(0)
        self.reason = signal.Signals(number).name
        self.at_once = self.asked
        self.asked = True
