"""Forecasts of prompt steps with the whole GPU, learned from such steps.

The time of a step grows with products of tokens and weights, and with products of pairs of tokens in attention. Both
run at about the same speed on the matrix units, so one speed is learned.

A step may also compile kernels, or find caches cold. So a much slower step than usual counts as a little slower, and a
much faster one proves that all before were slow.
"""

from collections.abc import Sequence

from common.models.base import ModelConfig

LONG_WORK = 512.0
"""Least work of a step that teaches; shorter steps are mostly launches and reads of weights."""
WEIGHT = 0.2
"""Weight of the last step in the mean."""
FAR = 2.0
"""Quotient of two times beyond which the slower step did other work, too."""


class Work:
    """Work of a model's prompts, in tokens without attention.

    pair: work of a pair of tokens, in layers that see all tokens. window_pair: in layers with a window of `window`.
    """

    def __init__(self, pair: float, window_pair: float = 0.0, window: int = 0) -> None:
        self.pair, self.window_pair, self.window = pair, window_pair, window

    @staticmethod
    def of(config: ModelConfig) -> "Work":
        """Return the work of a model's prompts."""
        pairs, weights = config.pair_products, config.token_weights / 2  # pairs have half of their products
        return Work(pairs.everywhere / weights, pairs.in_window / weights, pairs.window)

    def span(self, begin: int, end: int) -> float:
        """Return the work of a prompt's tokens from `begin` to `end`."""
        return float(end - begin) + self._pairs(end) - self._pairs(begin)

    def _pairs(self, num_tokens: int) -> float:
        seen = min(num_tokens, self.window)
        return self.pair * num_tokens**2 / 2 + self.window_pair * seen * (num_tokens - seen / 2)


class LearnedForecast:
    """Times on the whole GPU, alone, in milliseconds; 0 until `is_known`."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._unit_ms = 0.0  # mean time for the work of a token

    @property
    def is_known(self) -> bool:
        return self._unit_ms > 0.0

    def learn(self, chunks: Sequence[tuple[int, int]], took_ms: float) -> None:
        """Record the time of a step over chunks, each with its tokens and those before; ignores short steps."""
        work = self._of(chunks)
        if work >= LONG_WORK and took_ms > 0.0:
            unit_ms = took_ms / work
            if not self.is_known or unit_ms * FAR < self._unit_ms:
                self._unit_ms = unit_ms
            self._unit_ms += (min(unit_ms, FAR * self._unit_ms) - self._unit_ms) * WEIGHT

    def span_ms(self, begin: int, end: int) -> float:
        """See `law.Forecast`."""
        return self._unit_ms * self._work.span(begin, end)

    def step_ms(self, chunks: Sequence[tuple[int, int]]) -> float:
        """See `law.Forecast`."""
        return self._unit_ms * self._of(chunks)

    def _of(self, chunks: Sequence[tuple[int, int]]) -> float:
        return sum(self._work.span(before, before + count) for count, before in chunks)
