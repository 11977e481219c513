"""Report of `baton plan`: the formula with its numbers, a table of candidates, and commands to start the layout."""

import math
import shlex
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from common.settings.config import RouterSection
from deploy.planning.estimate import Estimate
from deploy.planning.search import Trial
from deploy.planning.simulation.layout import Layout
from deploy.planning.simulation.outcome import Objectives
from deploy.planning.step_times.costs import Costs
from deploy.planning.workload import Workload, shown

COLUMNS = ("WORKERS", "GPUS", "TTFT P50", "P{p}", "TPOT P50", "P{p}", "IN LIMITS", "OUTPUT TOKENS/S", "A GPU", "")
MOST_SHOWN = 8


class Flags(NamedTuple):
    """Further flags of the programs, as text; `baton serve` takes those of workers."""

    router: str = ""
    workers: str = ""  # those of the router included


def limits(objectives: Objectives) -> str:
    """Return the objectives in words."""
    said = []
    if objectives.ttft_ms < math.inf:
        said.append(f"the first token within {objectives.ttft_ms:g} ms")
    if objectives.tpot_ms < math.inf:
        said.append(f"{objectives.tpot_ms:g} ms a token behind it")
    return f"{' and '.join(said)}, for {objectives.percent:g} % of requests"


def formula(each: Estimate, workload: Workload, gb_per_s: float = 0.0) -> str:
    """Return the closed formula with its numbers, with a rate between hosts also that of their links."""
    found = f" {each.found:.0%} of prefixes are there, as a GPU has no room for more." if each.found < 1 else ""
    wire = (
        f"\n  links    KV blocks of all prompts are {each.moved_gb_per_s:.2f} GB/s, if all travel: those of "
        f"{each.moved_gb_per_s / gb_per_s:.2f} hosts of {gb_per_s:g} GB/s are busy"
        if gb_per_s
        else ""
    )
    return (
        f"By formula, for GPUs that do one thing each:{found}\n"
        f"  prefill  {shown(workload.rate)} prompts/s x {each.prompt_ms:.1f} ms = {each.prompt_busy:.2f} GPUs busy\n"
        f"  decode   {each.num_rows} rows of {each.context:,.0f} tokens take {each.step_ms:.2f} ms a step, "
        f"{each.num_rows / each.step_ms * 1e3:,.0f} tokens/s: {each.decode_busy:.2f} GPUs busy"
        f"{wire}"
    )


def table(trials: Sequence[Trial], chosen: Trial | None, objectives: Objectives) -> str:
    """Return a line for each of the last candidates, with the chosen layout marked, and hosts if some have several."""
    shown = trials[-MOST_SHOWN:]
    on_hosts = any(trial.layout.num_hosts > 1 for trial in shown)
    head: tuple[str, ...] = ("", *(column.format(p=f"{objectives.percent:g}") for column in COLUMNS))
    rows = [head, *((">" if trial is chosen else "", *_cells(trial)) for trial in shown)]
    if on_hosts:
        hosts = ["HOSTS", *(str(trial.layout.num_hosts) for trial in shown)]
        rows = [(*row[:3], each, *row[3:]) for row, each in zip(rows, hosts, strict=True)]
        head = rows[0]
    widths = [max(len(row[i]) for row in rows if len(row) == len(head)) for i in range(len(head))]
    lines = [_line(row, widths, 3 + on_hosts) for row in rows]
    more = [f"   and {len(trials) - len(shown)} smaller ones, none of which keeps the limits"]
    return "\n".join(lines + more * (len(shown) < len(trials)))


def start(layout: Layout, at_once: float, model: str, flags: Flags) -> str:
    """Return commands to start a layout; `at_once` is the mean number of requests in the system.

    Of several hosts, that of the router is the first with a decode worker.
    """
    gpus, at_once = ",".join(map(str, range(layout.num_gpus))), math.ceil(at_once)
    room = f" --router-max-requests {4 * at_once}" if at_once > RouterSection().max_requests // 4 else ""
    if layout.num_hosts > 1:
        return _start_hosts(layout, model, room, f" {flags.workers}" if flags.workers else "")
    given = {"ROUTER": flags.router, "PREFILL": flags.workers, "DECODE": flags.workers}
    variables = "".join(f" BATON_{name}_FLAGS='{text}'" for name, text in given.items() if text)
    room += f" {flags.workers}" if flags.workers else ""
    replicas = f"BATON_PREFILL_REPLICAS={layout.num_prefill} BATON_DECODE_REPLICAS={layout.num_decode}{variables}"
    return (
        f"    baton serve {shlex.quote(model)} --prefill {layout.num_prefill} --decode {layout.num_decode} "
        f"--gpus {gpus}{room}\n"
        f"    BATON_GPUS={gpus} {replicas} docker compose -f deploy/compose.yaml -f deploy/compose.gpu.yaml up -d"
    )


def _start_hosts(layout: Layout, model: str, room: str, more: str) -> str:
    """Return a command for each host, the same ones together; `room` is for the router, `more` for all."""
    wire = "--net-secret-file secret --net-router-endpoint tcp://ROUTER:5570 --net-advertise HOST"
    gpus = ",".join(map(str, range(layout.gpus_of_host)))
    parts = layout.parts
    first = next(part for part in parts if part[1])
    parts.remove(first)
    lines = [f"    1 host: baton serve {shlex.quote(model)} {_counts(first)} --gpus {gpus} {wire}{room}{more}"]
    for part, count in Counter(parts).items():
        hosts = f"{count} host{'s' * (count > 1)}"
        lines.append(f"    {hosts}: baton join {shlex.quote(model)} {_counts(part)} --gpus {gpus} {wire}{more}")
    return "\n".join(lines)


def _counts(part: tuple[int, int]) -> str:
    return f"--prefill {part[0]} --decode {part[1]}"


def cautions(costs: Costs, workload: Workload) -> list[str]:
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
        said.append(
            "Rates are scaled from those of another model or of weights, keys and values in 16 bits, not measured."
        )
    return said


def _cells(trial: Trial) -> tuple[str, ...]:
    layout = trial.layout
    where = f"{layout.num_prefill}P{layout.num_decode}D", str(layout.num_gpus)
    if trial.problem:
        return *where, trial.problem
    times = (*(f"{ms:,.1f}" for ms in trial.ttft_ms), *(f"{ms:.2f}" for ms in trial.tpot_ms))
    speed = (f"{trial.tokens_per_s:,.0f}", f"{trial.tokens_per_s / layout.num_gpus:,.0f}")
    return (*where, *times, f"{trial.attainment:.1f} %", *speed, "" if trial.keeps_up else "falls behind")


def _line(row: Sequence[str], widths: Sequence[int], num_names: int) -> str:
    """Return a row: columns of names, and then numbers or a single text."""
    names = [cell.ljust(width) for cell, width in zip(row[:num_names], widths, strict=False)]
    numbers = list(row[num_names:])
    if len(row) == len(widths):
        numbers = [cell.rjust(width) for cell, width in zip(numbers, widths[num_names:], strict=True)]
    return "  ".join((*names, *numbers)).rstrip()
