"""Ends a process that hangs, as nobody else can be sure that it does; who keeps it running starts it again."""

import faulthandler
import time

LIMIT_S = 30.0
"""Without a sign of life: workers have given their memory server up for lost by then, and wait for the next."""
SIGN_S = 1.0


class Watchdog:
    """A thread that needs no interpreter; it writes where every thread stands to stderr, and exits with 1."""

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        self.limit_s, self._signed_s = limit_s, 0.0

    def alive(self) -> None:
        """Call at each turn of a loop."""
        now_s = time.monotonic()
        if now_s - self._signed_s > SIGN_S:
            self._signed_s = now_s
            faulthandler.dump_traceback_later(self.limit_s, exit=True)

    def stop(self) -> None:
        """Nobody need be watched any more."""
        faulthandler.cancel_dump_traceback_later()
