"""Results of a simulation as seen by clients: percentiles, throughput, and requests within their objectives."""

import math
from dataclasses import dataclass

from common.base.percentiles import percentile, weighted_percentile
from deploy.planning.simulation.request import Request


@dataclass(frozen=True, slots=True)
class Objectives:
    """Service level objectives: limits in milliseconds, and the percentage of requests to keep all limits."""

    ttft_ms: float = math.inf
    tpot_ms: float = math.inf
    percent: float = 99.0

    def are_met(self, request: Request) -> bool:
        return request.ttft_ms <= self.ttft_ms and request.tpot_ms <= self.tpot_ms


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results of a simulation; times in milliseconds."""

    requests: list[Request]  # evaluated requests, all finished
    gaps: list[tuple[float, int]]  # of all requests, except first gaps: ms, count
    num_tokens: int  # outputs of requests that ended within `span_ms`
    span_ms: float  # evaluated time; by default from first arrival to last end

    def figure(self, name: str) -> float:
        """Return a figure in ms or tokens/s by the names of benchmarks/results.csv.

        Names are `output_throughput`, or a percentile such as `ttft_p50` of ttft, first_gap, tpot or itl.
        """
        if name == "output_throughput":
            return self.tokens_per_s
        what, _, percent = name.rpartition("_p")
        if what == "itl":
            firsts = [(each.first_gap_ms, 1) for each in self.requests if each.num_outputs > 1]
            return weighted_percentile([*firsts, *self.gaps], float(percent))
        if what not in ("ttft", "first_gap", "tpot"):
            raise ValueError(f"figure {name!r}")
        return percentile((getattr(each, f"{what}_ms") for each in self.requests), float(percent))

    @property
    def tokens_per_s(self) -> float:
        """Output tokens a second of requests ended within the observed time."""
        return self.num_tokens / self.span_ms * 1e3

    def attainment(self, objectives: Objectives) -> float:
        """Return the percentage of requests within the objectives."""
        return 100 * sum(map(objectives.are_met, self.requests)) / len(self.requests)
