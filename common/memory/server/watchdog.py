"""Watchdog that ends a hung process, so a supervisor or a worker starts a new process."""

import faulthandler
import time

LIMIT_S = 30.0
"""Silence before the end; by then workers have given the server up."""
SIGN_S = 1.0
"""Shortest time between two re-arms of the timer."""


class Watchdog:
    """A timer thread that needs no interpreter: dumps all stacks to stderr, and exits with 1."""

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        self.limit_s, self._signed_s = limit_s, 0.0

    def alive(self) -> None:
        """Start the timer again; call at each turn of a loop."""
        now_s = time.monotonic()
        if now_s - self._signed_s > SIGN_S:
            self._signed_s = now_s
            faulthandler.dump_traceback_later(self.limit_s, exit=True)

    def stop(self) -> None:
        """Cancel the timer."""
        faulthandler.cancel_dump_traceback_later()
