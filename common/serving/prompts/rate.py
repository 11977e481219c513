"""Measured time for computing prompts; a copy from elsewhere is worthwhile only if faster.

A step has a fixed cost plus a cost for each token. In long steps the fixed cost is negligible, so long steps give the
cost of a token directly. Before the first long step, the difference between short steps of different sizes gives the
cost.
"""

import time
from collections import deque
from collections.abc import Callable

LONG_TOKENS = 512
"""Least tokens of a step that gives the token cost directly."""
WEIGHT = 0.2
"""Weight of the last step in the mean of its size class."""
LEAST_US = 5.0
"""Assumed least cost of a token before long steps; low, so only long copies pay."""


class PromptRate:
    """Estimator of the cost of a token.

    Steps run one after another, so a step's time counts from the previous step's end or from the step's launch.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._long_token_us = 0.0  # mean of long steps
        self._short: dict[int, tuple[float, float]] = {}  # mean tokens and microseconds, by bits of tokens
        self._ended_s = 0.0  # end of the last step
        self._launched: deque[tuple[int, float]] = deque()  # tokens and time of each launched step

    def launched(self, num_tokens: int) -> None:
        """Record the launch of a step over `num_tokens` tokens."""
        self._launched.append((num_tokens, self._clock()))

    def ended(self) -> None:
        """Record the end of the earliest launched step."""
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
        """Microseconds for computing a token beside others."""
        if self._long_token_us or len(self._short) < 2:
            return self._long_token_us or LEAST_US
        (fewest, least_us), (most, most_us) = self._short[min(self._short)], self._short[max(self._short)]
        return max((most_us - least_us) / (most - fewest), LEAST_US)

    def block_us(self, block_size: int) -> int:
        """Return microseconds for a block of tokens, at least 1."""
        return max(1, round(self.token_us * block_size))
