"""Gate of a decode worker's launches: one step in each turn of prompts."""

import time
from collections.abc import Callable

from common.serving.turns.page import TurnPage

FRESH_S = 1.0
"""Seconds for which a launched step counts as decoding, if its worker dies; its successor is launched sooner."""


class DecodeGate:
    """A gate that is never closed; for a worker that shares its GPU with no prefill worker."""

    num_turns: int = 0
    """Launched steps beside prompt steps for which streams wait."""

    def is_closed(self) -> bool:
        """Tell whether the present turn has had its step."""
        return False

    def launched(self, step_s: float, client: int | None) -> None:
        """Record the launch of a step that takes `step_s` alone, for streams of a client; None: of several."""

    def rest(self) -> None:
        """Record that nothing is decoded."""


class TurnGate(DecodeGate):
    """A gate by the page of turns."""

    def __init__(self, page: TurnPage, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._page, self._clock = page, clock
        self._served = 0  # turn of the last launched step; 0: none
        self._is_resting = True

    def is_closed(self) -> bool:
        turn = self._page.turn(int(self._clock() * 1e6))
        return turn != 0 and turn == self._served

    def launched(self, step_s: float, client: int | None) -> None:
        now_s = self._clock()
        self._served = self._page.turn(int(now_s * 1e6))
        self.num_turns += self._served != 0
        self._page.decode(max(1, int(step_s * 1e6)), int((now_s + FRESH_S) * 1e6), client)
        self._is_resting = False

    def rest(self) -> None:
        if not self._is_resting:
            self._page.decode(0, 0)
            self._is_resting = True
