"""How long computing prompts takes here, as the steps show: what is kept elsewhere comes back if that is faster."""

import time
from collections import deque
from collections.abc import Callable

MIN_TOKENS = 512
"""Of a step that tells something: a shorter one takes as long as a longer one."""
WEIGHT = 0.2
"""Of the last step."""
UNKNOWN_US = 1000.0
"""A token, until a step has shown it: longer than on any GPU."""


class PromptRate:
    """Steps run one after the other, so that each takes from the end of the one before, or from its own launch."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._token_us = 0.0
        self._ended_s = 0.0  # the last step
        self._launched: deque[tuple[int, float]] = deque()  # steps: their tokens, and when

    def launched(self, num_tokens: int) -> None:
        """A step over so many tokens is on its way."""
        self._launched.append((num_tokens, self._clock()))

    def ended(self) -> None:
        """The step that was launched first is over."""
        num_tokens, launched_s = self._launched.popleft()
        begun_s, self._ended_s = max(launched_s, self._ended_s), self._clock()
        if num_tokens >= MIN_TOKENS:
            token_us = (self._ended_s - begun_s) / num_tokens * 1e6
            self._token_us += (token_us - self._token_us) * (WEIGHT if self._token_us else 1.0)

    def block_us(self, block_size: int) -> int:
        """What computing so many tokens takes, in microseconds: at least 1."""
        return max(1, round((self._token_us or UNKNOWN_US) * block_size))
