"""Counts of a front, and their export to Prometheus."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from common.base.errors import RequestError


@dataclass(slots=True)
class Counts:
    """Numbers since the start."""

    num_tokens: int = 0
    num_lost: int = 0  # sessions
    refusals: Counter[str] = field(default_factory=Counter)  # by code

    def count_refusal(self, error: RequestError) -> None:
        self.refusals[error.code] += 1

    def families(self, num_open: int, num_unread_bytes: int, *, has_session: bool) -> Iterator[Metric]:
        """Yield all families; `num_open` are choices not over."""
        yield GaugeMetricFamily("baton_front_connected", "1 with a session at the dispatcher", value=int(has_session))
        yield GaugeMetricFamily("baton_front_open_completions", "completions of this front, not over", value=num_open)
        yield GaugeMetricFamily(
            "baton_front_unread_answer_bytes", "of answers that clients have not read", value=num_unread_bytes
        )
        yield CounterMetricFamily("baton_front_tokens", "tokens received from the dispatcher", value=self.num_tokens)
        yield CounterMetricFamily("baton_front_lost_sessions", "sessions that ended early", value=self.num_lost)
        refusals = CounterMetricFamily(
            "baton_front_refusals", "HTTP requests of this front answered with an error", labels=["code"]
        )
        for code, num in self.refusals.items():
            refusals.add_metric([code], num)
        yield refusals
