"""Logs changes of the readiness, with their causes."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from router.placement.readiness import Readiness

logger = logging.getLogger(__name__)

SETTLING_S = 3.0
"""Seconds a degradation must last to be logged, because workers start one by one."""


@dataclass(frozen=True, slots=True)
class _Change:
    readiness: Readiness
    cause: str
    at_s: float


class ReadinessLog:
    """Logger of readiness changes; remembers the readiness logged last."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._told = Readiness("unavailable", ())
        self._settling: _Change | None = None

    def note(self, now: Readiness, cause: str) -> None:
        """Log at once if service starts or stops; delay a degradation until `check` finds it lasting."""
        if now == self._told:
            self._settling = None
        elif now.status == "degraded":
            at_s = self._settling.at_s if self._settling else self._clock()
            self._settling = _Change(now, cause, at_s)
        else:
            self._tell(now, cause)

    def check(self) -> None:
        """Log a lasting degradation; call a few times a second."""
        settling = self._settling
        if settling is not None and self._clock() - settling.at_s >= SETTLING_S:
            self._tell(settling.readiness, settling.cause)

    def _tell(self, now: Readiness, cause: str) -> None:
        why = "; ".join(now.texts)
        if now.status == "ok":
            logger.info("requests are served since %s", cause)
        elif now.status == "degraded":
            logger.warning("degraded since %s: %s", cause, why)
        elif self._told.status != "unavailable":
            limit = "they wait, for router.worker_wait_s at most"
            logger.warning("no request is served since %s; %s: %s", cause, limit, why)
        self._told, self._settling = now, None
