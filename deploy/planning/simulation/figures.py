"""Figures as seen by clients: percentiles, throughput, and the share of requests within their objectives."""

import math
from dataclasses import dataclass

from deploy.planning.simulation.percentiles import percentile, weighted_percentile
from deploy.planning.simulation.request import Request
from deploy.planning.simulation.simulator import Outcome

NO_LIMIT = math.inf


@dataclass(frozen=True, slots=True)
class Objectives:
    """Service level objectives: limits in milliseconds, and the percentage of requests to keep all limits."""

    ttft_ms: float = NO_LIMIT
    tpot_ms: float = NO_LIMIT
    percent: float = 99.0

    def are_met(self, request: Request) -> bool:
        return request.ttft_ms <= self.ttft_ms and request.tpot_ms <= self.tpot_ms


class Figures:
    """Figures of a simulation, by the names of benchmarks/results.csv."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome

    def of(self, name: str) -> float:
        """Return a figure in ms or tokens/s: `ttft_p50` and the like for ttft, first_gap, tpot, e2e, itl, or
        `output_throughput`.
        """
        if name == "output_throughput":
            return self.tokens_per_s
        what, _, percent = name.rpartition("_p")
        if what == "itl":
            firsts = [(each.first_gap_ms, 1) for each in self.outcome.requests if each.num_outputs > 1]
            return weighted_percentile([*firsts, *self.outcome.gaps], float(percent))
        if what not in ("ttft", "first_gap", "tpot", "e2e"):
            raise ValueError(f"figure {name!r}")
        return percentile((getattr(each, f"{what}_ms") for each in self.outcome.requests), float(percent))

    @property
    def tokens_per_s(self) -> float:
        """Output tokens a second of requests ended within the observed time."""
        return self.outcome.num_tokens / self.outcome.span_ms * 1e3

    def attainment(self, objectives: Objectives) -> float:
        """Return the percentage of requests within the objectives."""
        requests = self.outcome.requests
        return 100 * sum(map(objectives.are_met, requests)) / len(requests)
