"""Report of `baton plan`: the formula with its numbers, a table of candidates, and commands to start the layout."""

import math
from collections.abc import Sequence

from common.settings.config import RouterSection
from deploy.planning.estimate import Estimate
from deploy.planning.search import Trial
from deploy.planning.simulation.figures import Objectives
from deploy.planning.step_times.costs import Costs
from deploy.planning.workload import Workload, shown

COLUMNS = ("WORKERS", "GPUS", "TTFT P50", "P{p}", "TPOT P50", "P{p}", "IN LIMITS", "OUTPUT TOKENS/S", "A GPU", "")


def limits(objectives: Objectives) -> str:
    """Return the objectives in words."""
    said = []
    if objectives.ttft_ms < math.inf:
        said.append(f"the first token within {objectives.ttft_ms:g} ms")
    if objectives.tpot_ms < math.inf:
        said.append(f"{objectives.tpot_ms:g} ms a token behind it")
    return f"{' and '.join(said)}, for {objectives.percent:g} % of requests"


def formula(estimate: Estimate, workload: Workload, costs: Costs, objectives: Objectives) -> str:
    """Return the closed formula with its numbers."""
    rate, each = workload.rate, estimate
    lines = [
        "By formula, for GPUs that do one thing each:",
        f"  prefill  {shown(rate)} prompts/s x {each.prompt_ms:.1f} ms = {each.prompt_busy:.2f} GPUs busy",
    ]
    if each.found < 1:
        lines[0] += f" {each.found:.0%} of prefixes are there, as a GPU has no room for more."
    if each.num_prefill:
        why = ""
        if objectives.ttft_ms < math.inf:
            left_ms = objectives.ttft_ms - costs.rates.apart.request_ms - each.slowest_prompt_ms
            why = (
                f", each at most {each.most_busy:.0%}, so that {objectives.percent:g} % wait no longer than "
                f"{left_ms:.0f} ms"
            )
        lines[-1] += f"{why}: {_workers(each.num_prefill)}"
    else:
        lines[-1] += ", and no wait is short enough"
    if each.num_rows:
        lines.append(
            f"  decode   {each.num_rows} rows of {each.context:,.0f} tokens take {each.step_ms:.2f} ms a step, "
            f"{each.num_rows / each.step_ms * 1e3:,.0f} tokens/s: {each.decode_busy:.2f} GPUs busy, "
            f"{_workers(each.num_decode)}"
        )
    else:
        lines.append(f"  decode   a step of one row takes {each.step_ms:.2f} ms: no batch keeps the limit")
    return "\n".join(lines)


def table(trials: Sequence[Trial], chosen: Trial | None, objectives: Objectives) -> str:
    """Return a line for each candidate, with the chosen layout marked.

    Of smaller candidates only the next size is shown; the others are counted.
    """
    ordered = sorted(
        trials, key=lambda trial: (trial.layout.all_gpus, trial.layout.num_decode, trial.layout.num_prefill)
    )
    sizes = sorted({trial.layout.all_gpus for trial in ordered})
    size = chosen.layout.all_gpus if chosen else sizes[-1]
    least = max((each for each in sizes if each < size), default=size)
    shown = [trial for trial in ordered if trial.layout.all_gpus >= least]
    head = ("", *(column.format(p=f"{objectives.percent:g}") for column in COLUMNS))
    rows = [head, *((">" if trial is chosen else "", *_cells(trial)) for trial in shown)]
    widths = [max(len(row[i]) for row in rows if len(row) == len(head)) for i in range(len(head))]
    lines = [_line(row, widths) for row in rows]
    if len(shown) < len(ordered):
        lines.append(f"   and {len(ordered) - len(shown)} smaller ones, none of which keeps the limits")
    return "\n".join(lines)


def start(trial: Trial, model: str) -> str:
    """Return commands to start the layout."""
    layout = trial.layout
    gpus = ",".join(map(str, range(layout.num_gpus)))
    most = RouterSection().max_requests
    room = f" --router-max-requests {2 * trial.most_at_once}" if trial.most_at_once > most // 2 else ""
    serve = f"baton serve {model} --prefill {layout.num_prefill} --decode {layout.num_decode} --gpus {gpus}{room}"
    scale = (
        f"BATON_PREFILL_REPLICAS={layout.num_prefill} BATON_DECODE_REPLICAS={layout.num_decode} docker compose up -d"
    )
    if layout.num_hosts == 1:
        return f"    {serve}\n    BATON_GPUS={gpus} {scale}"
    return (
        f"    On each of {layout.num_hosts} hosts {layout.num_prefill} prefill and {layout.num_decode} decode workers "
        f"on GPUs {gpus}, all of which dial one\n    router: --net-router-endpoint tcp://HOST:5570 "
        f"--net-secret-file FILE{room}"
    )


def cautions(trial: Trial, costs: Costs, workload: Workload) -> list[str]:
    """Return assumptions of the plan not covered by the simulation."""
    said = []
    wanted = workload.rate * sum(each.outputs for each in workload.lengths) / len(workload.lengths)
    seen = costs.rates.router_tokens_per_s
    if wanted > seen:
        said.append(
            f"One router was measured with up to {seen:,.0f} output tokens/s, this is {wanted:,.0f}: its process "
            "is not simulated. Put several systems, each with a router, behind a balancer, or measure it."
        )
    if any("estimate" in each for each in costs.rates.origin):
        said.append("Rates are scaled from those of another model, not measured.")
    if trial.layout.num_hosts > 1:
        said.append("Several hosts were simulated, and never run: measured are up to four GPUs of one.")
    return said


def _cells(trial: Trial) -> tuple[str, ...]:
    layout = trial.layout
    workers = f"{layout.num_prefill}P{layout.num_decode}D"
    gpus = str(layout.all_gpus) if layout.num_hosts == 1 else f"{layout.num_hosts} x {layout.num_gpus}"
    if trial.problem:
        return workers, gpus, trial.problem
    times = (*(f"{ms:,.1f}" for ms in trial.ttft_ms), *(f"{ms:.2f}" for ms in trial.tpot_ms))
    speed = (f"{trial.tokens_per_s:,.0f}", f"{trial.tokens_per_s / layout.all_gpus:,.0f}")
    return (workers, gpus, *times, f"{trial.attainment:.1f} %", *speed, "" if trial.keeps_up else "falls behind")


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    """Return a row: two columns of names, and then numbers or a single text."""
    names = "  ".join(cell.ljust(width) for cell, width in zip(row[:3], widths, strict=False))
    if len(row) < len(widths):
        return f"{'  '.join(cell.ljust(width) for cell, width in zip(row[:-1], widths, strict=False))}  {row[-1]}"
    return f"{names}  {'  '.join(cell.rjust(width) for cell, width in zip(row[3:], widths[3:], strict=True))}".rstrip()


def _workers(count: int) -> str:
    return f"{count} workers" if count > 1 else "1 worker"
