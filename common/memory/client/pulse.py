"""Whether somebody is at the other end of a connection: asked now and then, and told from the answers."""

import time
from collections.abc import Callable

ASK_S = 1.0
"""Between two questions whether the server is there, by which it knows the same of us."""
MAX_UNANSWERED = 10


class Pulse:
    """Counts questions since the last word."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._heard_s = self._asked_s = clock()
        self._num_unanswered = 0

    def heard(self) -> None:
        """A word has come."""
        self._heard_s, self._num_unanswered = self._clock(), 0

    def asks(self) -> bool:
        """Whether to ask now; who says yes is taken to have asked."""
        if self._clock() - self._asked_s <= ASK_S:
            return False
        self._asked_s = self._clock()
        self._num_unanswered += 1
        return True

    @property
    def silence(self) -> str:
        """For how long nobody has answered, when that is too long."""
        if self._num_unanswered <= MAX_UNANSWERED:
            return ""
        return f"not a word for {self._clock() - self._heard_s:.0f} s"
