"""Times of steps, from measured points.

**A prompt step** has, for each prompt, n tokens that attend to c tokens before them. The step takes L(n) + k·Σ(n·c +
n²/2). L is the time of products with weights, for all tokens together; the sum is attention, for each prompt
separately. k follows from the two longest measured prompts, the longer in several steps. L is linear between measured
lengths. With too many tokens to gather, K and V are read in place, and k grows by a measured factor.

**A decode step** has rows up to a graph's batch and K tokens of context in all. Its time is linear in K between
measured contexts, and linear in rows between measured batches at equal K. Reading each shared prefix once would spare S
tokens. If S is enough bytes, workers do so. The step then takes the time of K - S tokens, plus a kernel with work
growing with S. Otherwise each row reads its whole context, partly from cache: a measured part of the time for S is
added.

**On one GPU** both kinds slow each other down. Beside a prompt with a share of the multiprocessors, both take a
measured factor longer. Beside a prompt with all multiprocessors, each kernel of a decode step waits for a kernel of the
prompt. So a decode step grows by a measured part of the prompt step's time, and the prompt runs in the rest.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable

from common.device.engine.step_rules import MIN_SPARED_BYTES, batch_buckets
from common.settings.config import DecodeSection
from deploy.planning.step_times.memory import MEMORY_FRACTION, Room
from deploy.planning.step_times.rates import Rates

Point = tuple[float, float]


class Curve:
    """A function linear between points and beyond the last point; flat before the first unless `slanted`.

    Args:
        points: x and y, at least one, with distinct x.
        slanted: continue the first slope before the first point, but not below 0.
    """

    def __init__(self, points: Iterable[Point], *, slanted: bool = False) -> None:
        ordered = sorted(points)
        if not ordered:
            raise ValueError("a curve without points")
        self._xs = [x for x, _ in ordered]
        self._ys = [y for _, y in ordered]
        if len(set(self._xs)) < len(self._xs):
            raise ValueError(f"a curve with two values at one place: {self._xs}")
        self._slanted = slanted

    def at(self, x: float) -> float:
        xs, ys = self._xs, self._ys
        if len(xs) == 1 or (x <= xs[0] and not self._slanted):
            return ys[0]
        right = min(max(1, bisect_right(xs, x)), len(xs) - 1)
        slope = (ys[right] - ys[right - 1]) / (xs[right] - xs[right - 1])
        return max(0.0, ys[right - 1] + slope * (x - xs[right - 1]))


MAX_KEYS = 65_536
"""Most tokens of gathered K and V (`common/ops/prompt_attention.py`)."""
MAX_ROWS = DecodeSection().max_num_seqs
"""Rows of a decode step."""
Chunk = tuple[int, int]
"""Tokens of a prompt in a step, and tokens before."""


class PromptCosts:
    """Times of prompt steps at a share of the GPU; `pair_ms` is k."""

    def __init__(self, rates: Rates, share: int) -> None:
        points = {int(tokens): ms for tokens, ms in _at_share(rates, share)}
        self.step_tokens = rates.step_tokens
        self.pair_ms, self._scattered = _pair_ms(points, self.step_tokens), rates.scattered
        self._products = Curve((n, ms - self.pair_ms * n * n / 2) for n, ms in points.items() if n <= self.step_tokens)

    def ms(self, chunks: Iterable[Chunk]) -> float:
        """Return the time of a step over all chunks."""
        num_tokens = num_keys = 0
        pairs = 0.0
        for count, before in chunks:
            num_tokens += count
            num_keys += before + count
            pairs += count * (before + count / 2)
        pairs *= self._scattered if num_keys > MAX_KEYS else 1
        return self._products.at(num_tokens) + self.pair_ms * pairs

    def scattered(self, num_prompts: int, num_tokens: int, num_before: int, step_ms: float) -> float:
        """Return the factor of attention to explain a measured step of equal prompts."""
        pairs = num_prompts * num_tokens * (num_before + num_tokens / 2)
        return (step_ms - self._products.at(num_prompts * num_tokens)) / (self.pair_ms * pairs)

    def full_ms(self, num_tokens: int, step_tokens: int, num_cached: int = 0) -> float:
        """Return the time of a prompt within full steps, a lower bound for any worker."""
        pairs = (num_tokens**2 - num_cached**2) / 2
        return self._products.at(step_tokens) * (num_tokens - num_cached) / step_tokens + self.pair_ms * pairs

    def prompt_ms(self, num_tokens: int, step_tokens: int = 0, num_cached: int = 0) -> float:
        """Return the time of a lone prompt behind its cached tokens, in steps of `step_tokens` or as measured."""
        step_tokens = step_tokens or self.step_tokens
        starts = range(num_cached, num_tokens, step_tokens)
        return sum(self.ms([(min(step_tokens, num_tokens - start), start)]) for start in starts)


class StepCosts:
    """Times of decode steps."""

    def __init__(self, rates: Rates, max_rows: int = MAX_ROWS) -> None:
        batches = sorted({int(rows) for rows, *_ in rates.steps})
        self._batches, self._rates = batches, rates
        self._min_spared = MIN_SPARED_BYTES / max(1, rates.shape.kv_bytes)
        self._curves: list[Curve] = [
            Curve([(rows * context, ms) for rows, context, ms, _ in rates.steps if rows == batch], slanted=True)
            for batch in batches
        ]
        buckets = batch_buckets(max_rows)
        self._buckets = [buckets[bisect_left(buckets, rows)] for rows in range(max_rows + 1)]

    def ms(self, num_rows: int, num_tokens: float, num_spared: float = 0) -> float:
        """Return the time of a step of `num_rows` rows with `num_tokens` context tokens in all.

        Args:
            num_spared: tokens spared by reading each shared prefix once.
        """
        once_ms = self._ms(num_rows, num_tokens - num_spared)
        if not num_spared:
            return once_ms
        rates = self._rates
        if num_spared >= self._min_spared:
            return once_ms + rates.prefix_kernel_ms + rates.prefix_kernel_ms_per_1000 * num_spared / 1000
        return once_ms + rates.reread * (self._ms(num_rows, num_tokens) - once_ms)

    def _ms(self, num_rows: int, num_tokens: float) -> float:
        """Return the time of a step without shared prefixes."""
        bucket = self._buckets[num_rows]
        right = bisect_left(self._batches, bucket)
        if right >= len(self._batches):
            return self._curves[-1].at(num_tokens) * bucket / self._batches[-1]
        if self._batches[right] == bucket or right == 0:
            return self._curves[right].at(num_tokens)
        low, high = self._batches[right - 1], self._batches[right]
        part = (bucket - low) / (high - low)
        return (1 - part) * self._curves[right - 1].at(num_tokens) + part * self._curves[right].at(num_tokens)


class Costs:
    """All times and sizes for simulated workers."""

    def __init__(self, rates: Rates, *, max_rows: int = MAX_ROWS, memory_fraction: float = MEMORY_FRACTION) -> None:
        self.rates, self.max_rows = rates, max_rows
        self.room = Room(rates.shape, rates.memory_bytes, memory_fraction)
        self.step_tokens = self.room.step_tokens
        self.whole, self.part = PromptCosts(rates, 100), PromptCosts(rates, rates.share)
        self.steps = StepCosts(rates, max_rows)
        # milliseconds to copy the KV blocks of tokens to another GPU of the host
        self.copies = Curve(((tokens, ms) for tokens, ms in rates.copies), slanted=True)
        # factor of a decode step of rows beside a prompt with a share of the GPU
        self.beside_steps = Curve((rows, factor) for rows, factor in rates.beside_steps)

    @property
    def token_us(self) -> float:
        """Time to compute a prompt token in full steps, in microseconds."""
        return self.whole.full_ms(self.step_tokens, self.step_tokens) / self.step_tokens * 1e3

    def found_ms(self, num_tokens: int) -> float:
        """Return the time to find `num_tokens` cached tokens of a prompt."""
        return self.rates.found_ms_per_1000 * num_tokens / 1000


def _at_share(rates: Rates, share: int) -> list[tuple[float, float]]:
    """Return lengths and times at a share, interpolated between measured shares."""
    shares = sorted({int(percent) for _, percent, _ in rates.prompts})
    lengths = sorted({tokens for tokens, percent, _ in rates.prompts if percent == shares[-1]})
    by_length = {
        tokens: Curve((percent, ms) for length, percent, ms in rates.prompts if length == tokens) for tokens in lengths
    }
    return [(tokens, curve.at(share)) for tokens, curve in by_length.items()]


def _pair_ms(points: dict[int, float], step_tokens: int) -> float:
    """Return k, from the longest prompt and the longest single-step prompt; 0 without both."""
    singles, longest = [n for n in points if n <= step_tokens], max(points)
    if not singles or longest <= step_tokens:
        return 0.0
    single = max(singles)
    # L is assumed proportional to tokens from `single` on: L(single) = t(single) - k·single²/2.
    scale = longest / single
    return max(0.0, (points[longest] - scale * points[single]) / (longest**2 / 2 - scale * single**2 / 2))
