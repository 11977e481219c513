"""How long computing prompts takes here, as the steps show: what is kept elsewhere comes back if that is faster.

A step takes some time however few tokens it has, and more for each of them. Of long steps the first part does not
matter, so that they tell what a token takes by themselves. As long as there was none, short ones of different sizes
tell it by what the larger take more.
"""

import time
from collections import deque
from collections.abc import Callable

LONG_TOKENS = 512
"""Of a step that tells something by itself."""
WEIGHT = 0.2
"""Of the last step in what those of its size take."""
LEAST_US = 5.0
"""A token, at least as short steps tell, and before any step: hardly less on any GPU. So until steps have shown that it
takes more nothing but what is long waits for a copy."""


class PromptRate:
    """Steps run one after the other, so that each takes from the end of the one before, or from its own launch."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._long_token_us = 0.0  # of long steps
        self._short: dict[int, tuple[float, float]] = {}  # tokens and microseconds of a step, by bits of the former
        self._ended_s = 0.0  # the last step
        self._launched: deque[tuple[int, float]] = deque()  # steps: their tokens, and when

    def launched(self, num_tokens: int) -> None:
        """A step over so many tokens is on its way."""
        self._launched.append((num_tokens, self._clock()))

    def ended(self) -> None:
        """The step that was launched first is over."""
        num_tokens, launched_s = self._launched.popleft()
        begun_s, self._ended_s = max(launched_s, self._ended_s), self._clock()
        took_us = (self._ended_s - begun_s) * 1e6
        if num_tokens >= LONG_TOKENS:
            token_us = took_us / num_tokens
            self._long_token_us += (token_us - self._long_token_us) * (WEIGHT if self._long_token_us else 1.0)
        elif not self._long_token_us:
            tokens, step_us = self._short.get(num_tokens.bit_length(), (num_tokens, took_us))
            mean = tokens + (num_tokens - tokens) * WEIGHT, step_us + (took_us - step_us) * WEIGHT
            self._short[num_tokens.bit_length()] = mean

    @property
    def token_us(self) -> float:
        """What computing a token takes, beside others, in microseconds."""
        if self._long_token_us or len(self._short) < 2:
            return self._long_token_us or LEAST_US
        (fewest, least_us), (most, most_us) = self._short[min(self._short)], self._short[max(self._short)]
        return max((most_us - least_us) / (most - fewest), LEAST_US)

    def block_us(self, block_size: int) -> int:
        """The same of so many tokens: at least 1."""
        return max(1, round(self.token_us * block_size))
