"""Liveness of the other end of a connection: questions now and then, and their answers."""

import time
from collections.abc import Callable

ASK_S = 1.0
"""Time between two questions; questions also tell the server of a live worker."""
MAX_UNANSWERED = 10


class Pulse:
    """Number of questions since the last message."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._heard_s = self._asked_s = clock()
        self._num_unanswered = 0

    def heard(self) -> None:
        """Note a message from the other end."""
        self._heard_s, self._num_unanswered = self._clock(), 0

    def asks(self) -> bool:
        """Tell whether to ask now; the caller must ask if true."""
        if self._clock() - self._asked_s <= ASK_S:
            return False
        self._asked_s = self._clock()
        self._num_unanswered += 1
        return True

    @property
    def silence(self) -> str:
        """Description of a silence that is too long; else empty."""
        if self._num_unanswered <= MAX_UNANSWERED:
            return ""
        return f"not a word for {self._clock() - self._heard_s:.0f} s"
