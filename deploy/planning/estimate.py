"""GPUs kept busy by a load, by formula: the start of the search, and the bounds that no number of GPUs overcomes.

**Prefill.** With a rate of λ prompts a second and t seconds each, λ·E[t] GPUs are busy.

**Decode.** B is the most rows with room for KV and a step within the limit of a token. A GPU makes B tokens a step.
Wanted are λ times the tokens of a reply except the first.

**Prefixes.** The share of prefixes found, and not computed, is the share with room in the pool of a GPU. Rows with a
common prefix hold its blocks once, and a decode step need not read the blocks for each row.

Waits, chunks, windows, and losses of a GPU with both roles are the simulator's.
"""

import math
from dataclasses import dataclass, replace

from common.base.percentiles import percentile
from deploy.planning.simulation.loads import Lengths, Prefixes
from deploy.planning.simulation.outcome import Objectives
from deploy.planning.step_times.costs import Costs
from deploy.planning.workload import Workload


@dataclass(frozen=True, slots=True)
class Estimate:
    """Results of the formulas; times in milliseconds, for GPUs with a single role."""

    prompt_ms: float  # mean
    prompt_busy: float  # GPUs busy with prompts
    num_rows: int  # most rows of a step within the limit, at least 1
    context: float  # mean tokens of a row
    step_ms: float  # of a step of `num_rows`
    decode_busy: float  # GPUs busy decoding with such steps
    found: float  # share of prefixes found in the pool
    least_prefill: float  # workers always busy with full steps, all prefixes found
    least_decode: float  # workers always busy with full batches of a single prefix
    request_ms: float  # from arrival to the last token, without waiting
    moved_gb_per_s: float  # KV of all prompts, none of it known where they are decoded


def estimate(costs: Costs, workload: Workload, objectives: Objectives) -> Estimate:
    """Compute the formulas for GPUs with a single role."""
    lengths, prefixes = _found(costs, workload), workload.prefixes
    prompt_ms = sum(costs.whole.prompt_ms(n, costs.step_tokens, cached) for n, _, cached in lengths) / len(lengths)
    num_steps = sum(each.outputs - 1 for each in lengths)
    tokens = sum((each.outputs - 1) * (each.inputs + each.outputs / 2) for each in lengths)
    batches = _Batches(costs, tokens / num_steps if num_steps else 0.0, prefixes)
    alike = replace(batches, prefixes=prefixes and replace(prefixes, count=1))
    num_rows, most_rows = batches.most_rows(objectives.tpot_ms), alike.most_rows(math.inf)
    step_ms, steps_per_ms = batches.ms(num_rows), workload.rate * num_steps / len(lengths) / 1e3
    inputs = [each.inputs for each in lengths if each.outputs > 1] or [0]
    full_ms = [costs.whole.full_ms(inputs, costs.step_tokens, cached) for inputs, _, cached in _all_found(workload)]
    return Estimate(
        prompt_ms=prompt_ms,
        prompt_busy=workload.rate * prompt_ms / 1e3,
        num_rows=num_rows,
        context=batches.context,
        step_ms=step_ms,
        decode_busy=steps_per_ms * step_ms / num_rows,
        found=_share_found(costs, workload),
        least_prefill=workload.rate * sum(full_ms) / len(full_ms) / 1e3,
        least_decode=steps_per_ms * alike.ms(most_rows) / most_rows,
        request_ms=costs.rates.apart.request_ms + prompt_ms + num_steps / len(lengths) * step_ms,
        moved_gb_per_s=workload.rate * sum(map(costs.rates.shape.context_bytes, inputs)) / len(inputs) / 1e9,
    )


@dataclass(frozen=True, slots=True)
class _Batches:
    """Decode steps on a decode-only GPU; rows have equal contexts, each with a random prefix."""

    costs: Costs
    context: float
    prefixes: Prefixes | None

    def ms(self, num_rows: int) -> float:
        return self.costs.steps.ms(num_rows, num_rows * self.context, self._num_spared(num_rows))

    def most_rows(self, tpot_ms: float) -> int:
        """Return the most rows with a step within `tpot_ms` and with room for all tokens, at least 1."""
        room = self.costs.room.kv_tokens(0, 1)
        fitting = (
            rows
            for rows in range(self.costs.max_rows, 1, -1)
            if rows * self.costs.room.taken(round(self.context)) - self._num_spared(rows) <= room
            and self.ms(rows) <= tpot_ms
        )
        return next(fitting, 1)

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
    share = _share_found(costs, workload)
    are_there = (int((number + 1) * share) > int(number * share) for number in range(len(workload.lengths)))
    return [
        cached if found else each
        for each, cached, found in zip(workload.lengths, _all_found(workload), are_there, strict=True)
    ]


def obstacles(costs: Costs, workload: Workload, objectives: Objectives) -> list[str]:
    """Return reasons why no number of GPUs can keep the limits, a sentence each; empty without an obstacle."""
    found, percent = [], objectives.percent
    lone = [
        costs.rates.apart.request_ms + costs.found_ms(cached) + costs.whole.prompt_ms(inputs, costs.step_tokens, cached)
        for inputs, _, cached in _all_found(workload)
    ]
    if (prompt_ms := percentile(lone, percent)) > objectives.ttft_ms:
        found.append(
            f"a first token within {objectives.ttft_ms:g} ms: a prompt alone on a GPU takes {prompt_ms:.1f} ms for "
            f"{percent:g} % of them; ask for at least that, or for shorter prompts"
        )
    alone = [costs.steps.ms(1, inputs + outputs / 2) for inputs, outputs, _ in workload.lengths if outputs > 1]
    if alone and (step_ms := percentile(alone, percent)) > objectives.tpot_ms:
        found.append(
            f"{objectives.tpot_ms:g} ms a token: a decode step of one sequence takes {step_ms:.2f} ms; ask for at "
            "least that"
        )
    room, longest = costs.room.kv_tokens(1, 1), max(each.inputs + each.outputs for each in workload.lengths)
    if costs.room.taken(longest) > room:
        found.append(
            f"a request of {longest:,} tokens: a GPU that does both has room for {room:,} tokens of KV beside the "
            "weights; give plan a GPU with more memory, or shorten it"
        )
    return found
