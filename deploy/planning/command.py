"""`baton plan`: its flags, and what they mean."""

import argparse
import math
import sys
from dataclasses import replace
from pathlib import Path

from common.errors import ConfigError
from common.options import number
from deploy.planning import live, report, traces
from deploy.planning.by_hand import parse_points, rates_by_hand
from deploy.planning.costs import Costs
from deploy.planning.estimate import estimate, obstacles
from deploy.planning.figures import Objectives
from deploy.planning.layout import Layout, parse_layout
from deploy.planning.memory import MEMORY_FRACTION
from deploy.planning.rates import Rates, read_rates, shipped
from deploy.planning.scaling import scaled
from deploy.planning.search import Search, Trial
from deploy.planning.shape import read_shape
from deploy.planning.workload import MOST_REQUESTS, Replay, Span, Steady, Workload

DEFAULT_RATES = "h200-qwen3-4b"
EPILOG = f"""\
Which rates: --model-rates NAME is one of those that come with Baton ({", ".join(shipped())}) or a file of yours; with
--model DIR they are scaled to that model's shape, which is an estimate. For a GPU without any, measure it: run there
python -m benchmarks.prompt_step, decode_step, handoff, one_long and serve with --results rows.csv (the command lines
are in benchmarks/README.md), and make a file of the rows as benchmarks/rates.py does. Or give what matters most by
hand, with --prompt-ms and --step-ms, or have a running router tell it, with --from.

{traces.__doc__}"""


def add_plan(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """The command and its flags."""
    parser = commands.add_parser(
        "plan",
        help="how many workers a load takes, by measured rates and a simulation",
        description="Say how many prefill and decode workers on how many GPUs keep limits of the first token and of "
        "each token behind it: by a formula, and by simulating the queues of what it says and of its neighbours. Exit "
        "status 1 if nothing keeps them.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_load(parser)
    _add_limits(parser)
    _add_rates(parser)


def _add_load(parser: argparse.ArgumentParser) -> None:
    load = parser.add_argument_group("what is asked for")
    load.add_argument("--rate", type=number(float, 1e-3, 1e6), metavar="R", help="requests a second (Poisson)")
    load.add_argument("--input-len", type=_span, metavar="N[-M]", help="prompt tokens (default: 1024)")
    load.add_argument("--output-len", type=_span, metavar="N[-M]", help="output tokens (default: 128)")
    load.add_argument(
        "--cached-len",
        type=number(int, 0, traces.MAX_TOKENS),
        default=0,
        metavar="N",
        help="tokens that each prompt begins with and that are there already, as a system prompt is (default: 0)",
    )
    load.add_argument("--trace", type=Path, metavar="FILE", help="arrivals and lengths instead: see below")
    load.add_argument(
        "--speed",
        type=number(float, 1e-3, 1e3),
        default=1.0,
        help="replay the trace so many times as fast (default: 1)",
    )
    load.add_argument("--seed", type=int, default=0, help="another one draws other arrivals and lengths (default: 0)")


def _add_limits(parser: argparse.ArgumentParser) -> None:
    limits = parser.add_argument_group("what is promised, and with what")
    limits.add_argument("--ttft-ms", type=number(float, 0.1, 1e7), metavar="MS", help="limit of the first token's time")
    limits.add_argument(
        "--tpot-ms", type=number(float, 0.01, 1e6), metavar="MS", help="limit of the time of each token behind it"
    )
    limits.add_argument(
        "--percentile",
        type=number(float, 1.0, 99.99),
        default=99.0,
        metavar="P",
        help="percent of requests that are to keep both (default: 99)",
    )
    limits.add_argument(
        "--gpus", type=number(int, 1, 100_000), default=8, metavar="N", help="GPUs at most (default: 8)"
    )
    limits.add_argument(
        "--gpus-per-host",
        type=number(int, 1, 256),
        default=8,
        metavar="N",
        help="KV blocks move within a host only; more GPUs are whole hosts (default: 8)",
    )
    limits.add_argument("--workers", metavar="xPyD", help="look at these workers only, on --gpus GPUs of one host")


def _add_rates(parser: argparse.ArgumentParser) -> None:
    rates = parser.add_argument_group("how fast workers are")
    rates.add_argument("--model-rates", metavar="NAME", help=f"which rates: see below (default: {DEFAULT_RATES})")
    rates.add_argument("--model", metavar="DIR", help="scale them to the model of this directory")
    rates.add_argument("--from", dest="url", metavar="URL", help="a running router, such as http://127.0.0.1:8000")
    rates.add_argument(
        "--watch-s",
        type=number(float, 0.1, 86_400.0),
        default=10.0,
        metavar="S",
        help="without --rate and --trace the load is what a running router finished within so long (default: 10)",
    )
    rates.add_argument(
        "--prompt-ms",
        metavar="N:MS,...",
        help="by hand: prompts of N tokens take so long, for example 1024:13.3,8192:123",
    )
    rates.add_argument(
        "--step-ms",
        metavar="ROWSxN:MS,...",
        help="by hand: decode steps of rows of N tokens, for example 1x1024:2.3,64x1024:5.1",
    )
    rates.add_argument(
        "--memory-fraction",
        type=number(float, 0.01, 1.0),
        default=MEMORY_FRACTION,
        metavar="F",
        help=f"of a GPU's memory, as --kv-memory-fraction (default: {MEMORY_FRACTION:g})",
    )


def plan(args: argparse.Namespace) -> int:
    """Print the plan; 0 if there is one, 1 if nothing keeps the limits. Raises ConfigError for what has no answer."""
    if args.ttft_ms is None and args.tpot_ms is None:
        raise ConfigError("no limit to plan for: give --ttft-ms, --tpot-ms or both")
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
    search = Search(costs, workload, objectives, each, args.gpus, args.gpus_per_host, tell=_tell)
    chosen = _only(search, layout) if layout else search.run()
    _tell("")
    return _said(search, chosen, args.model or "MODEL")


def _only(search: Search, layout: Layout) -> Trial | None:
    trial = search.try_layout(layout)
    return trial if search.attains(trial) else None


def _said(search: Search, chosen: Trial | None, model: str) -> int:
    """The table, and what follows from it."""
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
    """As a running system is, and under its load if no other is named."""
    if args.rate is None and args.trace is None:
        _tell(f"watching {args.url} for {args.watch_s:g} s")
        metrics, asked = live.watch(args.url, args.watch_s)
        inputs, outputs = (Span(tokens, tokens) for tokens in (asked.num_inputs, asked.num_outputs))
        lengths = (args.input_len or inputs, args.output_len or outputs)
        workload: Workload = Steady(asked.rate, *lengths, args.seed, args.cached_len)
    else:
        metrics, workload = live.told(live.fetched(args.url)), _workload(args)
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
        return Steady(args.rate, *lengths, args.seed, args.cached_len)
    if args.input_len or args.output_len or args.cached_len:
        raise ConfigError("--input-len, --output-len and --cached-len: not with --trace, which has them")
    read = traces.read_trace(args.trace)
    busiest = traces.busiest(read, MOST_REQUESTS)
    part = f"the busiest {len(busiest):,} of {len(read):,} of " if len(busiest) < len(read) else ""
    arrivals = [replace(each, time_ms=each.time_ms / args.speed) for each in busiest]
    return Replay(arrivals, f"{part}{args.trace.name}", args.seed)


def _span(text: str) -> Span:
    low, _, high = text.partition("-")
    try:
        span = Span(int(low), int(high or low))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text}: a number of tokens, or two such as 100-2000") from None
    if not 1 <= span.low <= span.high <= traces.MAX_TOKENS:
        raise argparse.ArgumentTypeError(f"{text}: 1 to {traces.MAX_TOKENS}, the smaller one first")
    return span


def _tell(text: str) -> None:
    """What goes on, where somebody looks."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text[:100]}", end="", file=sys.stderr, flush=True)
