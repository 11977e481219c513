"""`baton plan`: evaluation of the flags, and the answer."""

import argparse
import math
import sys
from dataclasses import replace
from pathlib import Path

from common.base.errors import ConfigError
from deploy.planning import live, report, traces
from deploy.planning.by_hand import parse_points, rates_by_hand
from deploy.planning.estimate import estimate, obstacles
from deploy.planning.flags import DEFAULT_RATES
from deploy.planning.scaling import scaled
from deploy.planning.search import Search, Trial
from deploy.planning.simulation.figures import Objectives
from deploy.planning.simulation.layout import Layout, parse_layout
from deploy.planning.step_times.costs import Costs
from deploy.planning.step_times.rates import Rates, read_rates
from deploy.planning.step_times.shape import read_shape
from deploy.planning.workload import MOST_REQUESTS, Replay, Span, Steady, Workload


def plan(args: argparse.Namespace) -> int:
    """Print the plan; return 0 if there is one, 1 if nothing keeps the limits. Raises ConfigError for bad input."""
    if args.ttft_ms is None and args.tpot_ms is None:
        raise ConfigError("no limit to plan for: give --ttft-ms, --tpot-ms or both")
    if args.prefixes and args.cached_len:
        raise ConfigError("--cached-len: not with --prefixes, of which the simulation finds out what is there")
    layout = parse_layout(args.workers, args.gpus) if args.workers else None
    objectives = Objectives(args.ttft_ms or math.inf, args.tpot_ms or math.inf, args.percentile)
    rates = _rates(args)
    rates, workload = _observed(args, rates) if args.url else (rates, _workload(args))
    costs = Costs(rates, memory_fraction=args.memory_fraction)
    print(
        f"Load: {workload.name}\nLimits: {report.limits(objectives)}\nRates: {rates.name}, {'; '.join(rates.origin)}\n"
    )
    if found := obstacles(costs, workload, objectives):
        print("No number of GPUs keeps these limits:", *(f"- {each}" for each in found), sep="\n")
        return 1
    each = estimate(costs, workload, objectives)
    print(report.formula(each, workload, costs, objectives) + "\n")
    search = Search(costs, workload, objectives, each, args.gpus, args.gpus_per_host, show=_show_progress)
    chosen = _only(search, layout) if layout else search.run()
    _show_progress("")
    return _print_result(search, chosen, args.model or "MODEL")


def _only(search: Search, layout: Layout) -> Trial | None:
    trial = search.try_layout(layout)
    return trial if search.attains(trial) else None


def _print_result(search: Search, chosen: Trial | None, model: str) -> int:
    """Print the table of trials and the chosen layout; return the exit status."""
    if search.trials:
        print("Simulated (times in ms):")
        print(report.table(search.trials, chosen, search.objectives) + "\n")
    if chosen is None:
        best = max(search.trials, key=lambda trial: trial.attainment, default=None)
        reached = f"; the best reaches {best.attainment:.1f} % ({best.layout.name})" if best else ""
        wanted = search.estimate.num_prefill + search.estimate.num_decode
        print(
            f"No layout of up to {search.most_gpus} GPUs keeps the limits{reached}. By formula it takes {wanted} GPUs: "
            "give more with --gpus, or raise a limit."
        )
        return 1
    print(f"Start {chosen.layout.name}:\n{report.start(chosen, model)}")
    for caution in report.cautions(chosen, search.costs, search.workload):
        print(f"\n{caution}")
    return 0


def _rates(args: argparse.Namespace) -> Rates:
    by_hand = [bool(args.prompt_ms), bool(args.step_ms)]
    if any(by_hand) and not all(by_hand):
        raise ConfigError("--prompt-ms and --step-ms: both, or neither")
    rates = read_rates(args.model_rates or DEFAULT_RATES)
    if args.model:
        rates = scaled(rates, read_shape(Path(args.model)), Path(args.model).resolve().name)
    if all(by_hand):
        rates = rates_by_hand(rates, parse_points(args.prompt_ms, 1), parse_points(args.step_ms, 2))
    return rates


def _observed(args: argparse.Namespace, rates: Rates) -> tuple[Rates, Workload]:
    """Return rates and load of a running system; a load in the flags replaces the observed load."""
    if args.rate is None and args.trace is None:
        if args.prefixes and not args.input_len:
            raise ConfigError("--prefixes with --from: --input-len, too, as a router tells of whole prompts")
        _show_progress(f"watching {args.url} for {args.watch_s:g} s")
        metrics, observed = live.watch(args.url, args.watch_s)
        inputs, outputs = (Span(tokens, tokens) for tokens in (observed.num_inputs, observed.num_outputs))
        lengths = (args.input_len or inputs, args.output_len or outputs)
        workload: Workload = Steady(observed.rate, *lengths, args.seed, args.cached_len, args.prefixes)
    else:
        metrics, workload = live.parse_metrics(live.fetch_metrics(args.url)), _workload(args)
    drawn = workload.lengths
    mean_tokens = sum(each.inputs + each.outputs / 2 for each in drawn) / len(drawn)
    if others := live.devices(args.url) - {rates.gpu}:
        where = ", ".join(sorted(others))
        print(
            f"Its workers are on {where}, these rates are of {rates.gpu}: all but the mean of its steps is a guess.\n"
        )
    prefill, decode = (live.steps_of(metrics, role) for role in ("prefill", "decode"))
    return live.calibrated(rates, prefill, decode, mean_tokens), workload


def _workload(args: argparse.Namespace) -> Workload:
    if (args.rate is None) == (args.trace is None):
        raise ConfigError("what to plan for: --rate, or --trace, or the load of a running router with --from")
    if args.trace is None:
        lengths = (args.input_len or Span(1024, 1024), args.output_len or Span(128, 128))
        return Steady(args.rate, *lengths, args.seed, args.cached_len, args.prefixes)
    if args.input_len or args.output_len or args.cached_len or args.prefixes:
        raise ConfigError("--input-len, --output-len, --cached-len and --prefixes: not with --trace, which has lengths")
    read = traces.read_trace(args.trace)
    busiest = traces.busiest(read, MOST_REQUESTS)
    part = f"the busiest {len(busiest):,} of {len(read):,} of " if len(busiest) < len(read) else ""
    arrivals = [replace(each, time_ms=each.time_ms / args.speed) for each in busiest]
    return Replay(arrivals, f"{part}{args.trace.name}", args.seed)


def _show_progress(text: str) -> None:
    """Show progress on a terminal."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text[:100]}", end="", file=sys.stderr, flush=True)
