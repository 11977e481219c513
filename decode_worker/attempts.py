"""What makes a message void that is still on its way: whoever speaks has a socket of its own, so no order holds.

An abort may come before what it aborts, and an offer before what was said of its prompt while that was computed.
"""

import time
from collections.abc import Callable

MEMORY_S = 60.0
"""How long an attempt is remembered."""


class Attempts:
    """The latest attempt of each request to which something happened lately."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._noted: dict[str, tuple[int, float]] = {}  # request id -> (attempt, when), oldest first

    def __len__(self) -> int:
        return len(self._noted)

    def note(self, request_id: str, attempt: int) -> None:
        """It happened to every attempt up to `attempt`."""
        earlier, _ = self._noted.pop(request_id, (attempt, 0.0))
        self._noted[request_id] = (max(attempt, earlier), self._clock())

    def cover(self, request_id: str, attempt: int) -> bool:
        """Whether it happened to that attempt."""
        return request_id in self._noted and attempt <= self._noted[request_id][0]

    def forget_old(self) -> None:
        """Let go of what is too old to matter; looks at no more than that."""
        while self._noted:
            request_id, (_, noted_s) = next(iter(self._noted.items()))
            if self._clock() - noted_s < MEMORY_S:
                return
            del self._noted[request_id]
