"""Silence of a stream, noticed by a timer that outlives many tokens: a timer for each would cost more than its text."""

import asyncio
import time
from typing import Self

from router.dispatch.completion.choice import Mailbox


class Silence:
    """Wakes the reader of a mailbox, without a delivery, whenever a stream was silent for `silence_s`; 0: never."""

    def __init__(self, mailbox: Mailbox, silence_s: float) -> None:
        self._mailbox, self._silence_s = mailbox, silence_s
        self._since_s = time.monotonic()
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> Self:
        if self._silence_s:
            self._look_in(self._silence_s)
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def end(self) -> None:
        """Note that something was written."""
        self._since_s = time.monotonic()

    def _look_in(self, delay_s: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._look)

    def _look(self) -> None:
        left_s = self._since_s + self._silence_s - time.monotonic()
        if left_s <= 0:
            self._mailbox.wake()
            self.end()
        self._look_in(left_s if left_s > 0 else self._silence_s)
