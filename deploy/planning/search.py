"""Search for the workers to start: candidates are simulated, smaller first, until a layout keeps the limits.

Each number of GPUs is tried with splits next to the formula's, and with both kinds of worker on every GPU.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from common.base.errors import ConfigError
from common.settings.slo_section import SloSection
from deploy.planning.estimate import Estimate
from deploy.planning.simulation.layout import Layout
from deploy.planning.simulation.outcome import Objectives
from deploy.planning.simulation.simulator import USUAL, Stuck, simulate
from deploy.planning.step_times.costs import Costs
from deploy.planning.workload import Workload

MOST_BUSY = 0.97
"""Largest busy share of a worker; beyond, queues grow for longer than simulated."""
KEPT_UP = 0.95
"""Least share of requested tokens that ends in time; below, queues still grow."""
NEIGHBOURS = 1
"""Workers more or fewer than the formula's split."""


@dataclass(frozen=True, slots=True)
class Trial:
    """Result of a simulated candidate; without figures if stuck, overloaded, or short of memory."""

    layout: Layout
    attainment: float = 0.0  # percent of requests within all limits
    tokens_per_s: float = 0.0
    ttft_ms: tuple[float, float] = (0.0, 0.0)  # median, and percentile of the objectives
    tpot_ms: tuple[float, float] = (0.0, 0.0)
    keeps_up: bool = True  # the system ends as much as comes
    problem: str = ""


@dataclass(slots=True)
class Search:
    """Search over layouts; `trials` holds simulated layouts, in order."""

    costs: Costs
    workload: Workload
    objectives: Objectives
    estimate: Estimate
    most_gpus: int  # of a host
    targets: SloSection = USUAL  # of GPUs with workers of both kinds
    show: Callable[[str], None] = lambda text: None
    most_hosts: int = 1
    gb_per_s: float = 0.0  # between two hosts
    is_spread: bool = False  # roles on hosts of their own
    trials: list[Trial] = field(default_factory=list)

    def run(self) -> Trial | None:
        """Return the chosen trial: the fewest GPUs within the limits, then the widest margin."""
        fewest = max(self.estimate.least_prefill, self.estimate.least_decode)  # if neither took from the other
        return next(filter(None, (self._best(self._layouts(*size)) for size in self._sizes(math.ceil(fewest)))), None)

    def _sizes(self, fewest: int) -> Iterator[tuple[int, int]]:
        """Yield GPUs in all and hosts: parts of one host, then whole hosts."""
        yield from ((num_gpus, 1) for num_gpus in range(max(1, fewest), self.most_gpus + 1))
        hosts = range(max(2, math.ceil(fewest / self.most_gpus)), self.most_hosts + 1)
        yield from ((num_hosts * self.most_gpus, num_hosts) for num_hosts in hosts)

    def _layouts(self, num_gpus: int, num_hosts: int) -> Iterator[Layout]:
        """Yield a worker of each kind on each GPU, then splits next to the formula's."""
        is_spread, each = self.is_spread and num_hosts > 1, self.estimate
        if not is_spread:
            yield Layout(num_gpus, num_gpus, num_gpus, num_hosts)
        near = round(num_gpus * each.prompt_busy / (each.prompt_busy + each.decode_busy))
        splits = {min(max(1, near + more), num_gpus - 1) for more in range(-NEIGHBOURS, NEIGHBOURS + 1)}
        for count in sorted(splits):
            if count > 0:
                yield Layout(count, num_gpus - count, num_gpus, num_hosts, is_spread)

    def attains(self, trial: Trial) -> bool:
        return not trial.problem and trial.keeps_up and trial.attainment >= self.objectives.percent

    def try_layout(self, layout: Layout) -> Trial:
        """Simulate a layout."""
        trial = self._simulated(layout)
        self.trials.append(trial)
        return trial

    def _overload(self, layout: Layout) -> str:
        """Return which role has more work than time in any order; empty if neither."""
        prefill, decode = (
            self.estimate.least_prefill / layout.num_prefill,
            self.estimate.least_decode / layout.num_decode,
        )
        if prefill > MOST_BUSY:
            return f"prompts take {prefill:.0%} of the time of their workers"
        if layout.is_spread and (wire := self._wire(layout)) > MOST_BUSY:
            return f"KV blocks take {wire:.0%} of what the hosts' links carry"
        return f"decode takes {decode:.0%} of the time of its workers" if decode > MOST_BUSY else ""

    def _wire(self, layout: Layout) -> float:
        """Return the share of links used if every prompt travels: those of hosts that send, or that receive."""
        senders, receivers = (sum(part[role] > 0 for part in layout.parts) for role in range(2))
        num_links = min(senders, receivers)
        return self.estimate.moved_gb_per_s / (num_links * self.gb_per_s)

    def _best(self, layouts: Iterable[Layout]) -> Trial | None:
        good = [trial for layout in layouts if self.attains(trial := self.try_layout(layout))]
        limits = self.objectives
        # by the share of a limit used by the worst figure
        return min(
            good,
            key=lambda each: max(each.ttft_ms[1] / limits.ttft_ms, each.tpot_ms[1] / limits.tpot_ms),
            default=None,
        )

    def _simulated(self, layout: Layout) -> Trial:
        if problem := self._overload(layout):
            return Trial(layout, problem=problem)
        self.show(f"simulating {layout.name} under {self.workload.name}")
        load = self.workload.load(self.estimate.request_ms / 1e3, self.objectives.percent)
        try:
            outcome = simulate(layout, self.costs, load, targets=self.targets, gb_per_s=self.gb_per_s)
        except (Stuck, ConfigError) as error:
            return Trial(layout, problem=str(error))
        percent = self.objectives.percent
        return Trial(
            layout,
            attainment=outcome.attainment(self.objectives),
            tokens_per_s=outcome.tokens_per_s,
            ttft_ms=(outcome.figure("ttft_p50"), outcome.figure(f"ttft_p{percent:g}")),
            tpot_ms=(outcome.figure("tpot_p50"), outcome.figure(f"tpot_p{percent:g}")),
            keeps_up=outcome.num_tokens >= KEPT_UP * sum(each.num_outputs for each in outcome.requests),
        )
