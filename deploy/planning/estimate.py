"""Number of workers for a load, by formula: the start of the search, and a check of its result.

**Prefill.** With a rate of λ prompts a second and t seconds each, λ·E[t] GPUs are busy. On a GPU busy for a share ρ of
the time, waiting prompts wait E[t²] / (2·E[t]·(1 - ρ)) on average (Pollaczek and Khinchine). Waits are about
exponential, so a share 1 - p of all prompts waits longer than the average times ln(ρ / (1 - p)). Source: Kingman, "The
single server queue in heavy traffic" (1961). The largest ρ is taken for which wait and prompt together keep the limit
of the first token.

**Decode.** B is the most rows with room for KV and a step within the limit of a token. A GPU makes B tokens a step.
Wanted are λ times the tokens of a reply except the first.

**Prefixes.** The share of prefixes found, and not computed, is the share with room in the pool of a GPU. Rows with a
common prefix hold its blocks once, and a decode step need not read the blocks for each row.

Both leave out details of the simulator: several prompts in a step, chunks, windows, and losses of a GPU with both
roles.
"""

import math
from dataclasses import dataclass, replace

from deploy.planning.simulation.figures import Objectives
from deploy.planning.simulation.loads import Lengths, Prefixes
from deploy.planning.simulation.percentiles import percentile
from deploy.planning.step_times.costs import Costs
from deploy.planning.workload import Workload


@dataclass(frozen=True, slots=True)
class Estimate:
    """Results of the formulas; times in milliseconds, for GPUs with a single role."""

    prompt_ms: float  # mean
    slowest_prompt_ms: float  # at the percentile of the objectives
    prompt_busy: float  # GPUs busy with prompts
    most_busy: float  # largest busy share of a GPU; 0: the limit cannot be kept
    num_rows: int  # most rows of a step within the limit; 0: none
    context: float  # mean tokens of a row
    step_ms: float  # of a step of `num_rows`, at least 1
    decode_busy: float  # GPUs busy decoding with such steps; infinite if none keeps the limit
    found: float  # share of prefixes found in the pool
    least_prefill: float  # workers always busy with full steps, all prefixes found
    least_decode: float  # workers always busy with full batches of a single prefix
    request_ms: float  # from arrival to the last token, without waiting

    @property
    def num_prefill(self) -> int:
        """Number of prefill workers, at least 1; 0 if the limit cannot be kept."""
        return max(1, math.ceil(self.prompt_busy / self.most_busy)) if self.most_busy else 0

    @property
    def num_decode(self) -> int:
        return max(1, math.ceil(self.decode_busy)) if self.num_rows else 0


def estimate(costs: Costs, workload: Workload, objectives: Objectives) -> Estimate:
    """Compute the formulas for GPUs with a single role."""
    lengths, request_ms = _found(costs, workload), costs.rates.apart.request_ms
    prompts = [costs.whole.prompt_ms(inputs, costs.step_tokens, cached) for inputs, _, cached in lengths]
    mean_ms = sum(prompts) / len(prompts)
    square_ms = sum(ms * ms for ms in prompts) / len(prompts)
    slowest_ms = percentile(prompts, objectives.percent)
    left_ms = objectives.ttft_ms - request_ms - slowest_ms
    num_steps = sum(each.outputs - 1 for each in lengths)
    tokens = sum((each.outputs - 1) * (each.inputs + each.outputs / 2) for each in lengths)
    context = tokens / num_steps if num_steps else 0.0
    batches = _Batches(costs, context, workload.prefixes)
    num_rows = batches.most_rows(objectives.tpot_ms)
    step_ms = batches.ms(max(1, num_rows))
    steps_per_s = workload.rate * num_steps / len(lengths)
    full_ms = [costs.whole.full_ms(inputs, costs.step_tokens, cached) for inputs, _, cached in _all_found(workload)]
    alike = replace(batches, prefixes=workload.prefixes and replace(workload.prefixes, count=1))
    most_rows = max(1, alike.most_rows(math.inf))
    return Estimate(
        prompt_ms=mean_ms,
        slowest_prompt_ms=slowest_ms,
        prompt_busy=workload.rate * mean_ms / 1e3,
        most_busy=_most_busy(mean_ms, square_ms, left_ms, 1 - objectives.percent / 100),
        num_rows=num_rows,
        context=context,
        step_ms=step_ms,
        decode_busy=steps_per_s * step_ms / 1e3 / num_rows if num_rows else math.inf,
        found=_share_found(costs, workload),
        least_prefill=workload.rate * sum(full_ms) / len(full_ms) / 1e3,
        least_decode=steps_per_s * alike.ms(most_rows) / 1e3 / most_rows,
        request_ms=request_ms + mean_ms + num_steps / len(lengths) * step_ms,
    )


def _most_busy(mean_ms: float, square_ms: float, left_ms: float, late: float) -> float:
    """Return the largest ρ at which at most a share `late` of prompts waits longer than `left_ms`."""
    if left_ms < 0:
        return 0.0
    low, high = 0.0, 1.0
    for _ in range(40):
        busy = (low + high) / 2
        mean_wait_ms = square_ms / (2 * mean_ms * (1 - busy))
        wait_ms = mean_wait_ms * math.log(busy / late) if busy > late > 0 else math.inf if late <= 0 else 0.0
        low, high = (busy, high) if wait_ms <= left_ms else (low, busy)
    return low


@dataclass(frozen=True, slots=True)
class _Batches:
    """Decode steps on a decode-only GPU; rows have equal contexts, each with a random prefix."""

    costs: Costs
    context: float
    prefixes: Prefixes | None

    def ms(self, num_rows: int) -> float:
        return self.costs.steps.ms(num_rows, num_rows * self.context, self._num_spared(num_rows))

    def most_rows(self, tpot_ms: float) -> int:
        """Return the most rows with a step within `tpot_ms` and with room for all tokens; 0 if none."""
        room = self.costs.room.kv_tokens(0, 1)
        fitting = (
            rows
            for rows in range(self.costs.max_rows, 0, -1)
            if rows * self.context - self._num_spared(rows) <= room and self.ms(rows) <= tpot_ms
        )
        return next(fitting, 0)

    def _num_spared(self, num_rows: int) -> float:
        """Return the prefix tokens spared by reading each prefix once."""
        prefixes = self.prefixes
        return (num_rows - prefixes.num_distinct(num_rows)) * prefixes.num_tokens if prefixes else 0.0


def _share_found(costs: Costs, workload: Workload) -> float:
    """Return the share of prefixes with room on a GPU with both roles."""
    prefixes = workload.prefixes
    return min(1.0, costs.room.kv_tokens(1, 1) / (prefixes.count * prefixes.num_tokens)) if prefixes else 1.0


def _all_found(workload: Workload) -> list[Lengths]:
    """Return the drawn lengths as if every prefix were cached."""
    prefixes = workload.prefixes
    return [each._replace(cached=prefixes.num_tokens) if prefixes else each for each in workload.lengths]


def _found(costs: Costs, workload: Workload) -> list[Lengths]:
    """Return the drawn lengths with cached prefixes in an even share."""
    drawn, share = list(workload.lengths), _share_found(costs, workload)
    if (prefixes := workload.prefixes) is None:
        return drawn
    are_there = [int((number + 1) * share) > int(number * share) for number in range(len(drawn))]
    return [each._replace(cached=prefixes.num_tokens * found) for each, found in zip(drawn, are_there, strict=True)]


def obstacles(costs: Costs, workload: Workload, objectives: Objectives) -> list[str]:
    """Return reasons why no number of GPUs can keep the limits, a sentence each; empty without an obstacle."""
    found, request_ms = [], costs.rates.apart.request_ms
    lone = [
        request_ms + costs.found_ms(cached) + costs.whole.prompt_ms(inputs, costs.step_tokens, cached)
        for inputs, _, cached in _all_found(workload)
    ]
    least_ms = percentile(lone, objectives.percent)
    if least_ms > objectives.ttft_ms:
        found.append(
            f"a first token within {objectives.ttft_ms:g} ms: a prompt alone on a GPU takes {least_ms:.1f} ms for "
            f"{objectives.percent:g} % of them; ask for at least that, or for shorter prompts"
        )
    alone = [costs.steps.ms(1, inputs + outputs / 2) for inputs, outputs, _ in workload.lengths if outputs > 1]
    step_ms = percentile(alone, objectives.percent) if alone else 0.0
    if step_ms > objectives.tpot_ms:
        found.append(
            f"{objectives.tpot_ms:g} ms a token: a decode step of one sequence takes {step_ms:.2f} ms; ask for at "
            "least that"
        )
    room, longest = costs.room.kv_tokens(1, 1), max(each.inputs + each.outputs for each in workload.lengths)
    if longest > room:
        found.append(
            f"a request of {longest:,} tokens: a GPU that does both has room for {room:,} tokens of KV beside the "
            "weights; give plan a GPU with more memory, or shorten it"
        )
    return found
