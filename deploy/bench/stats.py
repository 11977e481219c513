"""Figures of a run from a client's view of its requests. Pure: no clock, no network.

Definitions:
- TTFT: request sent to first chunk.
- TPOT: (last chunk - first chunk) / (output tokens - 1), a value for each request.
- ITL: every gap between two chunks of a request.
- First gap: first chunk to second, where a handoff between workers hides. Later gaps: all others.
- E2E: request sent to end of stream.
- Hit rate: prompt tokens not computed again, by the server's usage record.

Failed requests are counted, and enter no latency figure.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from common.base.percentiles import percentile

PERCENTILES = (50, 90, 99)
SLO_KEYS = ("ttft", "tpot", "e2e")


@dataclass(slots=True)
class RequestRecord:
    """Times and tokens of a request, in seconds of a monotonic clock. `error` is empty after success."""

    sent_s: float
    ended_s: float = 0.0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int | None = None  # of the prompt; None if the server says nothing
    output_ids: list[int] = field(default_factory=list)  # if asked for
    chunk_times_s: list[float] = field(default_factory=list)
    error: str = ""
    is_structured: bool = False
    turn: int = 0  # of the conversation; the first is 0

    @property
    def ttft_s(self) -> float:
        return self.chunk_times_s[0] - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Seconds per output token after the first; None for a single token."""
        if self.num_output_tokens < 2:
            return None
        return (self.chunk_times_s[-1] - self.chunk_times_s[0]) / (self.num_output_tokens - 1)

    @property
    def e2e_s(self) -> float:
        return self.ended_s - self.sent_s

    @property
    def gaps_s(self) -> list[float]:
        return [after - before for before, after in pairwise(self.chunk_times_s)]


@dataclass(frozen=True, slots=True)
class Figure:
    """A measured number."""

    name: str
    value: float
    unit: str


def parse_slo(text: str) -> dict[str, float]:
    """Parse limits in ms from `ttft=200,tpot=20,e2e=5000`; raises ValueError for anything else."""
    limits = {}
    for part in text.split(","):
        key, _, value = part.partition("=")
        if key not in SLO_KEYS:
            raise ValueError(f"SLO {part!r}: one of {', '.join(SLO_KEYS)}, for example ttft=200,tpot=20")
        limits[key] = float(value)
    return limits


def meets(record: RequestRecord, slo_ms: Mapping[str, float]) -> bool:
    """Tell whether a request succeeded within every limit."""
    if record.error:
        return False
    seen_s = {"ttft": record.ttft_s, "tpot": record.tpot_s or 0.0, "e2e": record.e2e_s}
    return all(seen_s[key] * 1e3 <= limit for key, limit in slo_ms.items())


def summarize(records: Sequence[RequestRecord], duration_s: float, slo_ms: Mapping[str, float]) -> list[Figure]:
    """Return every figure of a run of `duration_s` seconds; NaN marks unknown figures."""
    good = [record for record in records if not record.error]
    num_output_tokens = sum(record.num_output_tokens for record in good)
    num_tokens = num_output_tokens + sum(record.num_prompt_tokens for record in good)
    figures = [
        *_latencies("ttft", (record.ttft_s for record in good)),
        *_latencies("tpot", (tpot for record in good if (tpot := record.tpot_s) is not None)),
        *_latencies("first_gap", (gap for record in good for gap in record.gaps_s[:1])),
        *_latencies("later_gap", (gap for record in good for gap in record.gaps_s[1:])),
        *_latencies("itl", (gap for record in good for gap in record.gaps_s)),
        *_latencies("e2e", (record.e2e_s for record in good)),
        Figure("output_throughput", num_output_tokens / duration_s, "tokens/s"),
        Figure("total_throughput", num_tokens / duration_s, "tokens/s"),
        Figure("request_throughput", len(good) / duration_s, "requests/s"),
        Figure("hit_rate", _hit_rate(good), "%"),
        Figure("requests", len(good), ""),
        Figure("errors", len(records) - len(good), ""),
    ]
    if slo_ms:
        num_met = sum(meets(record, slo_ms) for record in records)
        figures.append(Figure("goodput", num_met / duration_s, "requests/s"))
    return figures


def _hit_rate(records: Sequence[RequestRecord]) -> float:
    """Return the hit rate in percent; NaN if no server counted.

    A request without a count counts as 0, because some servers omit the count after a miss.
    """
    if all(record.num_cached_tokens is None for record in records):
        return math.nan
    num_cached = sum(record.num_cached_tokens or 0 for record in records)
    return 100 * num_cached / sum(record.num_prompt_tokens for record in records)


def _latencies(name: str, values_s: Iterable[float]) -> list[Figure]:
    ordered = sorted(values_s)
    mean_s = sum(ordered) / len(ordered) if ordered else math.nan
    points = [(f"{name}_mean", mean_s), *((f"{name}_p{point}", percentile(ordered, point)) for point in PERCENTILES)]
    return [Figure(label, value_s * 1e3, "ms") for label, value_s in points]
