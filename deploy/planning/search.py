"""Search for the workers to start: candidates are simulated, smaller first, until a layout keeps the limits.

Up to a host, each number of GPUs is tried with splits next to the formula's, and with both kinds of worker on every
GPU. Beyond a host, all hosts are alike. For each split, a single host is simulated with its part of the load until the
limits are kept. Then all hosts are simulated together, with some more or fewer hosts.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from common.base.errors import ConfigError
from deploy.planning.estimate import Estimate
from deploy.planning.simulation.figures import Figures, Objectives
from deploy.planning.simulation.layout import Layout
from deploy.planning.simulation.simulator import Stuck, simulate
from deploy.planning.step_times.costs import Costs
from deploy.planning.workload import Workload

MOST_BUSY = 0.97
"""Largest busy share of a worker; beyond, queues grow for longer than simulated."""
MOST_FEWER = 3
"""Hosts to take away one by one, because hosts together rarely need far fewer."""
KEPT_UP = 0.95
"""Least share of requested tokens that ends in time; below, queues still grow."""
NEIGHBOURS = 1
"""Workers more or fewer than the formula's split."""


@dataclass(frozen=True, slots=True)
class Trial:
    """Result of a simulated candidate; without figures if standstills were too long or memory was short."""

    layout: Layout
    attainment: float = 0.0  # percent of requests within all limits
    tokens_per_s: float = 0.0
    ttft_ms: tuple[float, float] = (0.0, 0.0)  # median, and percentile of the objectives
    tpot_ms: tuple[float, float] = (0.0, 0.0)
    most_at_once: int = 0
    keeps_up: bool = True  # the system ends as much as comes
    problem: str = ""


@dataclass(slots=True)
class Search:
    """Search over layouts; `trials` holds layouts simulated under the whole load, in order."""

    costs: Costs
    workload: Workload
    objectives: Objectives
    estimate: Estimate
    most_gpus: int
    gpus_per_host: int
    show: Callable[[str], None] = lambda text: None
    trials: list[Trial] = field(default_factory=list)

    def run(self) -> Trial | None:
        """Return the chosen trial: the fewest GPUs within the limits, then the widest margin."""
        fewest = max(self.estimate.least_prefill, self.estimate.least_decode)  # if neither took from the other
        found = None
        for num_gpus in range(max(1, math.ceil(fewest)), min(self.most_gpus, self.gpus_per_host) + 1):
            if found := self._best(_layouts(self.estimate, num_gpus)):
                break
        most_hosts = self.most_gpus // self.gpus_per_host
        if found is None and most_hosts > 1:
            found = self._hosts(most_hosts)
        self._show_neighbours(found)
        return found

    def attains(self, trial: Trial) -> bool:
        return not trial.problem and trial.keeps_up and trial.attainment >= self.objectives.percent

    def try_layout(self, layout: Layout) -> Trial:
        """Simulate a layout under the whole load."""
        trial = self._simulated(layout, self.workload)
        self.trials.append(trial)
        return trial

    def _show_neighbours(self, found: Trial | None) -> None:
        """Try the formula's layout and layouts with a GPU more, too, for the table."""
        estimate, known = self.estimate, {trial.layout for trial in self.trials}
        most, wanted = min(self.most_gpus, self.gpus_per_host), estimate.num_prefill + estimate.num_decode
        is_possible = estimate.num_prefill and estimate.num_decode and wanted <= most
        more = [Layout(estimate.num_prefill, estimate.num_decode, wanted)] if is_possible else []
        if found is not None and found.layout.num_hosts == 1 and found.layout.num_gpus < most:
            more += _layouts(estimate, found.layout.num_gpus + 1)
        for layout in dict.fromkeys(more):
            if layout not in known:
                self.try_layout(layout)

    def _overload(self, layout: Layout, workload: Workload) -> str:
        """Return which role has more work than time in any order; empty if neither."""
        part = workload.rate / self.workload.rate
        prefill = part * self.estimate.least_prefill / (layout.num_prefill * layout.num_hosts)
        decode = part * self.estimate.least_decode / (layout.num_decode * layout.num_hosts)
        if prefill > MOST_BUSY:
            return f"prompts take {prefill:.0%} of the time of their workers"
        return f"decode takes {decode:.0%} of the time of its workers" if decode > MOST_BUSY else ""

    def _best(self, layouts: Iterable[Layout]) -> Trial | None:
        good = [trial for layout in layouts if self.attains(trial := self.try_layout(layout))]
        limits = self.objectives
        # by the share of a limit used by the worst figure
        return min(
            good,
            key=lambda each: max(each.ttft_ms[1] / limits.ttft_ms, each.tpot_ms[1] / limits.tpot_ms),
            default=None,
        )

    def _hosts(self, most_hosts: int) -> Trial | None:
        """Return a trial with about the fewest hosts, all alike."""
        splits = list(_layouts(self.estimate, self.gpus_per_host))
        needed = {split: self._hosts_of(split, most_hosts) for split in splits}
        fewest = min(needed.values())
        if fewest > most_hosts:
            self._all_hosts(splits, most_hosts)
            return next((trial for trial in self.trials if self.attains(trial)), None)
        close = [split for split in splits if needed[split] <= fewest + max(1, fewest // 20)]
        count, found = fewest, self._all_hosts(close, fewest)
        while found is None and count < most_hosts:
            count += 1
            found = self._all_hosts(close, count)
        for _ in range(MOST_FEWER):
            fewer = self._all_hosts(close, count - 1) if found is not None and count > 2 else None
            if fewer is None:
                break
            count, found = count - 1, fewer
        return found

    def _all_hosts(self, splits: Iterable[Layout], num_hosts: int) -> Trial | None:
        return self._best(replace(split, num_hosts=num_hosts) for split in splits)

    def _hosts_of(self, split: Layout, most_hosts: int) -> int:
        """Return the least number of hosts for a single host to keep the limits with its part."""
        low, high = 1, most_hosts + 1  # fails at `low`, or is not tried
        while low < high - 1:
            middle = (low + high) // 2
            trial = self._simulated(split, self.workload.of(middle))
            low, high = (low, middle) if self.attains(trial) else (middle, high)
        return high

    def _simulated(self, layout: Layout, workload: Workload) -> Trial:
        if problem := self._overload(layout, workload):
            return Trial(layout, problem=problem)
        self.show(f"simulating {layout.name} under {workload.name}")
        load = workload.load(self.estimate.request_ms / 1e3, self.objectives.percent)
        try:
            outcome = simulate(layout, self.costs, load)
        except (Stuck, ConfigError) as error:
            return Trial(layout, problem=str(error))
        figures, percent = Figures(outcome), self.objectives.percent
        return Trial(
            layout,
            attainment=figures.attainment(self.objectives),
            tokens_per_s=figures.tokens_per_s,
            ttft_ms=(figures.of("ttft_p50"), figures.of(f"ttft_p{percent:g}")),
            tpot_ms=(figures.of("tpot_p50"), figures.of(f"tpot_p{percent:g}")),
            most_at_once=outcome.most_at_once,
            keeps_up=outcome.num_tokens >= KEPT_UP * sum(each.num_outputs for each in outcome.requests),
        )


def _layouts(estimate: Estimate, num_gpus: int) -> Iterator[Layout]:
    """Yield a worker of each kind on each GPU of a host, then splits next to the formula's."""
    yield Layout(num_gpus, num_gpus, num_gpus)
    near = round(num_gpus * estimate.prompt_busy / (estimate.prompt_busy + estimate.decode_busy))
    splits = {min(max(1, near + more), num_gpus - 1) for more in range(-NEIGHBOURS, NEIGHBOURS + 1)}
    yield from (Layout(count, num_gpus - count, num_gpus) for count in sorted(splits) if count > 0)
