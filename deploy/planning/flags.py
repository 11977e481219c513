"""Flags of `baton plan`. Working modules are imported on demand, because the supervisor does not need planning."""

import argparse
from pathlib import Path

from common.settings.argument_parser import Commands
from common.settings.options import number
from deploy.planning import traces
from deploy.planning.simulation.loads import Prefixes
from deploy.planning.step_times.memory import MEMORY_FRACTION
from deploy.planning.step_times.rates import shipped
from deploy.planning.workload import Span

DEFAULT_RATES = "h200-qwen3-4b"
MAX_PREFIXES = 100_000
DESCRIPTION = """\
Say how many prefill and decode workers on how many GPUs keep limits of the
first token and of each token behind it: by a formula, and by simulating the
queues of what it says and of its neighbours. Exit status 1 if nothing keeps
them."""
EPILOG = f"""\
Which rates: --model-rates NAME is one of those that come with Baton ({", ".join(shipped())}) or a file of yours; with
--model DIR they are scaled to that model's shape, which is an estimate. For a GPU without any, measure it: run there
python -m benchmarks.prompt_step, decode_step, handoff, one_long and serve with --results rows.csv (the command lines
are in benchmarks/README.md), and make a file of the rows as benchmarks/rates.py does. Or give what matters most by
hand, with --prompt-ms and --step-ms, or have a running router tell it, with --from.

{traces.__doc__}"""


def add_plan(commands: Commands) -> None:
    parser = commands.add_parser(
        "plan",
        help="how many workers a load takes, by measured rates and a simulation",
        description=DESCRIPTION,
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
    load.add_argument(
        "--prefixes",
        type=_prefixes,
        metavar="COUNTxTOKENS",
        help="prompts begin with one of so many prefixes of so many tokens, all as likely; --input-len tokens follow",
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
        type=number(float, 1.0, 99.9),
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
    """Run `command.plan`."""
    from deploy.planning import command

    return command.plan(args)


def _prefixes(text: str) -> Prefixes:
    count, _, num_tokens = text.partition("x")
    if not (count.isdecimal() and num_tokens.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text}: COUNTxTOKENS, for example 8x4096")
    prefixes = Prefixes(int(count), int(num_tokens))
    if not (1 <= prefixes.count <= MAX_PREFIXES and 1 <= prefixes.num_tokens <= traces.MAX_TOKENS):
        raise argparse.ArgumentTypeError(f"{text}: 1 to {MAX_PREFIXES} prefixes of 1 to {traces.MAX_TOKENS} tokens")
    return prefixes


def _span(text: str) -> Span:
    low, _, high = text.partition("-")
    try:
        span = Span(int(low), int(high or low))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text}: a number of tokens, or two such as 100-2000") from None
    if not 1 <= span.low <= span.high <= traces.MAX_TOKENS:
        raise argparse.ArgumentTypeError(f"{text}: 1 to {traces.MAX_TOKENS}, the smaller one first")
    return span
