"""How the server waits: awake for a while after a message, and asleep after that."""

import selectors
import time

MOMENT_S = 50e-6


class Vigil:
    """Selects; for `awake_s` after something has arrived it sleeps for moments only, as `Backing` has it."""

    def __init__(self, selector: selectors.BaseSelector, awake_s: float) -> None:
        self.selector, self.awake_s = selector, awake_s
        self._until_s = 0.0

    def select(self, wait_s: float) -> list[selectors.SelectorKey]:
        """What there is to be read or written, after `wait_s` at most."""
        if is_awake := time.monotonic() < self._until_s:
            time.sleep(MOMENT_S)
        events = self.selector.select(0.0 if is_awake else wait_s)
        if events:
            self._until_s = time.monotonic() + self.awake_s
        return [key for key, _ in events]
