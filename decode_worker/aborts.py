"""Aborts that came before what they abort: router and prefill workers have sockets of their own, so no order holds."""

import time
from collections.abc import Callable

MEMORY_S = 60.0
"""How long an abort is remembered."""


class Aborts:
    """The latest aborted attempt of each request that was aborted lately."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._noted: dict[str, tuple[int, float]] = {}  # request id -> (attempt, when), oldest first

    def __len__(self) -> int:
        return len(self._noted)

    def note(self, request_id: str, attempt: int) -> None:
        """Every attempt up to `attempt` is aborted."""
        earlier, _ = self._noted.pop(request_id, (attempt, 0.0))
        self._noted[request_id] = (max(attempt, earlier), self._clock())

    def cover(self, request_id: str, attempt: int) -> bool:
        """Whether that attempt was aborted."""
        return request_id in self._noted and attempt <= self._noted[request_id][0]

    def forget_old(self) -> None:
        """Let go of what is too old to matter; looks at no more than that."""
        while self._noted:
            request_id, (_, noted_s) = next(iter(self._noted.items()))
            if self._clock() - noted_s < MEMORY_S:
                return
            del self._noted[request_id]
