"""Shutting down in order: the first signal asks to finish what is owned, the second to stop at once.

While a worker still starts it owns nothing, and the first signal ends it.
"""

import logging
import signal
import time
from types import FrameType

logger = logging.getLogger(__name__)


class Drain:
    """Whether and until when a worker's loop goes on."""

    def __init__(self, drain_s: float) -> None:
        self.drain_s = drain_s
        self.has_started = False
        self.asked = False
        self.at_once = False
        self.reason = "drained"  # why this worker is gone, to be said when it is
        self._begun = False
        self._deadline_s = 0.0

    def install(self) -> None:
        """Listen to SIGTERM and SIGINT; call from the main thread."""
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)

    def started(self) -> None:
        """From now on there may be something to finish."""
        self.has_started = True

    def ask(self, reason: str, *, at_once: bool = False) -> None:
        """As a first signal does, or a second, where nothing that is here may be finished; from any thread.

        To be asked again changes nothing.
        """
        if self.asked and self.at_once >= at_once:
            return
        how = "leaving at once, what is here goes on elsewhere" if at_once else "finishing what is here, and leaving"
        logger.warning("%s: %s", reason, how)
        self.asked, self.at_once = True, self.at_once or at_once
        self.reason = reason

    def begins(self) -> bool:
        """True exactly once, when shutting down was asked for."""
        if not self.asked or self._begun:
            return False
        self._begun = True
        self._deadline_s = time.monotonic() + self.drain_s
        logger.info("draining: taking nothing new, finishing for at most %.0f s", self.drain_s)
        return True

    def finished(self, owns_something: bool) -> bool:
        """Whether the loop ends now."""
        if not self._begun:
            return self.at_once
        is_late = time.monotonic() > self._deadline_s
        if owns_something and is_late:
            logger.warning("not all is finished after %.0f s; what is left goes on elsewhere", self.drain_s)
        return self.at_once or not owns_something or is_late

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self.has_started:
            logger.info("stopping before the start is complete")
            raise SystemExit(0)
        self.at_once = self.asked
        self.asked = True
