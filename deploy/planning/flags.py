"""Flags of `baton plan`. Working modules are imported on demand, because the supervisor does not need planning."""

import argparse
from pathlib import Path

from common.settings.argument_parser import Commands
from common.settings.config import HEADS, QUANTIZATIONS
from common.settings.memory_sections import KV_DTYPES
from common.settings.options import number
from common.settings.slo_section import SloSection
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
queues of what it says and of its neighbours, on one host or on several. Exit
status 1 if nothing keeps them."""
EPILOG = f"""\
Which rates: --model-rates NAME is one of those that come with Baton ({", ".join(shipped())}) or a file of yours; with
--model DIR they are scaled to that model's shape, which is an estimate. For a GPU without any, measure it: run there
python -m benchmarks.prompt_step, decode_step, handoff, one_long and serve with --results rows.csv (the command lines
are in benchmarks/README.md), and make a file of the rows as benchmarks/rates.py does. Or copy a file of
deploy/planning/step_times/measured, and replace what you know, prompts and steps above all.

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
    load = parser.add_argument_group("what is asked for").add_argument
    load("--rate", type=number(float, 1e-3, 1e6), metavar="R", help="requests a second (Poisson)")
    load("--input-len", type=_span, metavar="N[-M]", help="prompt tokens (default: 1024)")
    load("--output-len", type=_span, metavar="N[-M]", help="output tokens (default: 128)")
    about = "prompts begin with one of so many prefixes of so many tokens, all as likely; --input-len tokens follow"
    load("--prefixes", type=_prefixes, metavar="COUNTxTOKENS", help=about)
    load("--trace", type=Path, metavar="FILE", help="arrivals and lengths instead: see below")
    about = "replay the trace so many times as fast (default: 1)"
    load("--speed", type=number(float, 1e-3, 1e3), default=1.0, help=about)

    limit = parser.add_argument_group("what is promised, and with what").add_argument
    limit("--ttft-ms", type=number(float, 0.1, 1e7), metavar="MS", help="limit of the first token's time")
    about = "limit of the time of each token behind it"
    limit("--tpot-ms", type=number(float, 0.01, 1e6), metavar="MS", help=about)
    about = "percent of requests that are to keep both (default: 99)"
    limit("--percentile", type=number(float, 1.0, 99.9), default=99.0, metavar="P", help=about)
    about = "GPUs of a host at most (default: 8)"
    limit("--gpus", type=number(int, 1, 256), default=8, metavar="N", help=about)
    limit("--hosts", type=number(int, 1, 256), default=1, metavar="N", help="hosts at most, alike (default: 1)")
    about = "what a host's network carries each way, GB/s; /health of two such hosts has it for each pair of workers"
    limit("--host-gb-per-s", type=number(float, 1e-3, 1e4), default=0.0, metavar="R", help=about)
    about = "with several hosts: prefill and decode workers on hosts of their own, not some of either on each"
    limit("--spread", action="store_true", help=about)
    limit("--workers", metavar="xPyD", help="look at these workers only, on --gpus GPUs of each of --hosts")
    usual = SloSection()
    about = f"as of workers: pauses of streams on shared GPUs; 0: no turns (default: {usual.itl_ms:g})"
    limit("--slo-itl-ms", type=number(float, 0.0, 1e4), default=usual.itl_ms, metavar="MS", help=about)
    about = f"as of workers: lateness of prompts there, before streams wait (default: {usual.ttft_ms:g})"
    limit("--slo-ttft-ms", type=number(float, 0.0, 3.6e6), default=usual.ttft_ms, metavar="MS", help=about)

    rate = parser.add_argument_group("how fast workers are").add_argument
    about = f"which rates: see below (default: {DEFAULT_RATES})"
    rate("--model-rates", default=DEFAULT_RATES, metavar="NAME", help=about)
    rate("--model", metavar="PATH", help="scale them to the model of this directory or GGUF file")
    about = "with --model: its matrices in codes, as --model-quantization of workers on that GPU (default: auto)"
    rate("--model-quantization", choices=QUANTIZATIONS, default="auto", help=about)
    about = "with --model: its matrix of logits in 8 bits, as --model-head (default: keep)"
    rate("--model-head", choices=HEADS, default="keep", help=about)
    about = "of keys and values, as --kv-dtype of workers (default: auto)"
    rate("--kv-dtype", choices=KV_DTYPES, default="auto", help=about)
    about = f"of a GPU's memory, as --kv-memory-fraction (default: {MEMORY_FRACTION:g})"
    rate("--memory-fraction", type=number(float, 0.01, 1.0), default=MEMORY_FRACTION, metavar="F", help=about)


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
