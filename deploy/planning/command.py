"""`baton plan`: evaluation of the flags, and the answer."""

import argparse
import math
import sys
from dataclasses import replace
from pathlib import Path

from common.base.errors import ConfigError
from common.checkpoint.gguf.model_file import model_name
from common.models.forms import Target
from common.models.reading import AS_STORED, KEEP
from common.settings.slo_section import SloSection
from deploy.planning import report, traces
from deploy.planning.estimate import estimate, obstacles
from deploy.planning.search import Search, Trial
from deploy.planning.simulation.layout import parse_layout
from deploy.planning.simulation.outcome import Objectives
from deploy.planning.step_times.costs import Costs
from deploy.planning.step_times.rates import Rates, read_rates
from deploy.planning.step_times.scaling import scaled
from deploy.planning.step_times.shape import read_shape
from deploy.planning.workload import MOST_REQUESTS, Replay, Span, Steady, Workload


def plan(args: argparse.Namespace) -> int:
    """Print the plan; return 0 if there is one, 1 if nothing keeps the limits. Raises ConfigError for bad input."""
    if args.ttft_ms is None and args.tpot_ms is None:
        raise ConfigError("no limit to plan for: give --ttft-ms, --tpot-ms or both")
    if args.hosts > 1 and not args.host_gb_per_s:
        raise ConfigError("--hosts: say how fast KV blocks travel between them with --host-gb-per-s")
    layout = parse_layout(args.workers, args.gpus, args.hosts, is_spread=args.spread) if args.workers else None
    objectives = Objectives(args.ttft_ms or math.inf, args.tpot_ms or math.inf, args.percentile)
    rates = _rates(args)
    workload = _workload(args)
    costs = Costs(rates, memory_fraction=args.memory_fraction)
    print(
        f"Load: {workload.name}\nLimits: {report.limits(objectives)}\nRates: {rates.name}, {'; '.join(rates.origin)}\n"
    )
    if found := obstacles(costs, workload, objectives):
        print("No number of GPUs keeps these limits:", *(f"- {each}" for each in found), sep="\n")
        return 1
    each = estimate(costs, workload, objectives)
    print(report.formula(each, workload, args.host_gb_per_s) + "\n")
    search = Search(
        costs, workload, objectives, each, args.gpus, _targets(args), _show_progress,
        args.hosts, args.host_gb_per_s, args.spread,
    )  # fmt: skip
    if layout:
        trial = search.try_layout(layout)
        chosen = trial if search.attains(trial) else None
    else:
        chosen = search.run()
    _show_progress("")
    status = _print_result(search, chosen, args.model or "MODEL", _chosen_flags(args))
    if rates.shape.widening_bytes:
        print(
            "\nThese decode steps are too short: codes in groups were taken to be as fast as their bytes are read, "
            "but on an H100 a step of Qwen3-4B in int4 took 1.8 times as long for one sequence, 1.5 times for 64."
        )
    return status


def _print_result(search: Search, chosen: Trial | None, model: str, flags: report.Flags) -> int:
    """Print the table of trials and the chosen layout; return the exit status."""
    if search.trials:
        print("Simulated (times in ms):")
        print(report.table(search.trials, chosen, search.objectives) + "\n")
    if chosen is None:
        best = max(search.trials, key=lambda trial: trial.attainment, default=None)
        reached = f"; the best reaches {best.attainment:.1f} % ({best.layout.name})" if best else ""
        busy = search.estimate.prompt_busy + search.estimate.decode_busy
        print(
            f"No layout of up to {search.most_gpus * search.most_hosts} GPUs keeps the limits{reached}. By formula "
            f"{busy:.2f} GPUs are busy: give more with --gpus or --hosts, raise a limit, or plan for a part of "
            "the load."
        )
        return 1
    at_once = search.workload.rate * search.estimate.request_ms / 1e3
    print(f"Start {chosen.layout.name}:\n{report.start(chosen.layout, at_once, model, flags)}")
    for caution in report.cautions(search.costs, search.workload):
        print(f"\n{caution}")
    return 0


def _rates(args: argparse.Namespace) -> Rates:
    """Return the rates of the model, its quantization and its keys and values; raises ConfigError."""
    rates, path = read_rates(args.model_rates), Path(args.model or "")
    if args.model:
        target = Target(rates.capability)
        shape = read_shape(path, target, args.kv_dtype, args.model_quantization, args.model_head)
        return scaled(rates, shape, model_name(path))
    if chosen := _of_weights(args):
        raise ConfigError(
            f"{chosen}: rates do not say which of a model's matrices it holds in codes; name a directory or GGUF file "
            "with --model"
        )
    return scaled(rates, rates.shape.with_cache(args.kv_dtype), rates.model)


def _chosen_flags(args: argparse.Namespace) -> report.Flags:
    """Return the flags of the plan that the programs need, too."""
    of_weights, targets, usual = _of_weights(args), _targets(args), SloSection()
    pairs = {
        "--kv-dtype": "" if args.kv_dtype == "auto" else args.kv_dtype,
        "--slo-itl-ms": "" if targets.itl_ms == usual.itl_ms else f"{targets.itl_ms:g}",
        "--slo-ttft-ms": "" if targets.ttft_ms == usual.ttft_ms else f"{targets.ttft_ms:g}",
    }
    told = " ".join(f"{name} {value}" for name, value in pairs.items() if value)
    return report.Flags(router=of_weights, workers=f"{of_weights} {told}".strip())


def _targets(args: argparse.Namespace) -> SloSection:
    return SloSection(args.slo_itl_ms, args.slo_ttft_ms)


def _of_weights(args: argparse.Namespace) -> str:
    """Return the flags of the plan about matrices in 8 bits."""
    quantization = "" if args.model_quantization == AS_STORED else f"--model-quantization {args.model_quantization}"
    head = "" if args.model_head == KEEP else f"--model-head {args.model_head}"
    return f"{quantization} {head}".strip()


def _workload(args: argparse.Namespace) -> Workload:
    if (args.rate is None) == (args.trace is None):
        raise ConfigError("what to plan for: --rate, or --trace")
    if args.trace is None:
        lengths = (args.input_len or Span(1024, 1024), args.output_len or Span(128, 128))
        return Steady(args.rate, *lengths, args.prefixes)
    if args.input_len or args.output_len or args.prefixes:
        raise ConfigError("--input-len, --output-len and --prefixes: not with --trace, which has lengths")
    read = traces.read_trace(args.trace)
    busiest = traces.busiest(read, MOST_REQUESTS)
    part = f"the busiest {len(busiest):,} of {len(read):,} of " if len(busiest) < len(read) else ""
    arrivals = [replace(each, time_ms=each.time_ms / args.speed) for each in busiest]
    return Replay(arrivals, f"{part}{args.trace.name}")


def _show_progress(text: str) -> None:
    """Show progress on a terminal."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text[:100]}", end="", file=sys.stderr, flush=True)
