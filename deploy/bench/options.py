"""The command line of `serve`."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from common.base.plain_file import read_plain
from common.settings.argument_parser import ArgumentParser
from deploy.bench.prefixes import Prefixes
from deploy.bench.stats import parse_slo
from deploy.bench.workload import Draw, Even, HeavyTailed, Stream

Parsed = TypeVar("Parsed")

MAX_KEY_CHARS = 1000
MODES = "--rate R | --concurrency N | --all-at-once | --users N"


@dataclass(frozen=True, slots=True)
class Defaults:
    """Defaults of flags that differ between `baton bench` and `benchmarks.serve`."""

    concurrency: int | None = None  # if no mode is given; None makes a mode mandatory
    vocab_size: int = 151_000


USUAL = Defaults()


def parse_args(
    argv: list[str], description: str, prog: str = "python -m benchmarks.serve", defaults: Defaults = USUAL
) -> argparse.Namespace:
    """Parse the flags; exit with a message for flags that exclude each other."""
    mode = f"[{MODES}]" if defaults.concurrency else f"({MODES})"
    parser = ArgumentParser(prog=prog, usage=f"{prog} {mode} [option ...]", description=description)
    _add_system_flags(parser)
    _add_mode_flags(parser, defaults.concurrency)
    _add_prompt_flags(parser, defaults.vocab_size)
    _add_result_flags(parser)
    args = parser.parse_args(argv)
    if args.rate is args.concurrency is args.users is None and not args.all_at_once:
        args.concurrency = defaults.concurrency
    if problem := _problem(args):
        parser.error(problem)
    if args.zipf is not None:
        args.prefixes = Prefixes(args.prefixes.count, args.prefixes.num_tokens, args.zipf)
    if args.users:
        args.num_prompts = args.users * args.turns
    return args


def _problem(args: argparse.Namespace) -> str:
    """Name the first mistake in the flags, or return an empty string."""
    counts = (args.num_prompts, args.rounds, args.input_len, args.output_len, args.vocab_size, args.turns)
    problems = {
        "--rate, --concurrency and --users: above 0": any(
            value is not None and value <= 0 for value in (args.rate, args.concurrency, args.users)
        ),
        "--structured: a share, from 0 to 1": not 0 <= args.structured <= 1,
        "--beside: only with --rate": args.beside and not args.rate,
        "--burstiness: above 0, and only with --rate": args.burstiness <= 0 or (args.burstiness != 1 and not args.rate),
        "--temperature: at least 0": args.temperature < 0,
        "--top-p: above 0, up to 1, and only with --temperature": not 0 < args.top_p <= 1
        or (args.top_p < 1 and not args.temperature),
        "--num-prompts, --rounds, --input-len, --output-len, --vocab-size and --turns: at least 1": min(counts) < 1,
        "--think-s and --zipf: at least 0": args.think_s < 0 or (args.zipf or 0) < 0,
        "--zipf and --primed: only with --prefixes": (args.zipf is not None or args.primed) and not args.prefixes,
        "--crowd-out: at least 0, and only with --primed": args.crowd_out < 0 or (args.crowd_out and not args.primed),
        "--prompt-file: not with --prefixes, --tokenizer or --users": args.prompt_file
        and (args.prefixes or args.tokenizer or args.users),
        "--users: not with --tokenizer or --structured, as replies go on as token ids": args.users
        and (args.tokenizer or args.structured),
    }
    return next((problem for problem, is_there in problems.items() if is_there), "")


def _add_system_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="server to load (default: %(default)s)")
    parser.add_argument("--vs", metavar="URL", help="second server, loaded turn by turn with the first")
    parser.add_argument("--system", default="baton", help="label of the first server (default: %(default)s)")
    parser.add_argument("--vs-system", default="other", help="label of the second server (default: %(default)s)")
    for option, server in (("--started-by", "first"), ("--vs-started-by", "second")):
        parser.add_argument(
            option,
            default="",
            metavar="COMMAND",
            help=f"that started the {server} server, for --results",
        )
    parser.add_argument("--model", help="model name to send (default: the first that each server lists)")
    parser.add_argument(
        "--api-key-file",
        dest="api_key",
        type=_type(_first_line),
        metavar="FILE",
        help="whose first line is the API key that the first server asks for",
    )
    parser.add_argument("--deadline-s", type=float, default=600.0, help="for one request (default: 600)")


def _add_mode_flags(parser: argparse.ArgumentParser, concurrency: int | None) -> None:
    mode = parser.add_mutually_exclusive_group(required=not concurrency)
    mode.add_argument("--rate", type=float, metavar="R", help="requests a second, arriving at random (Poisson)")
    usual = f" (default: {concurrency}, unless another mode is asked for)" if concurrency else ""
    mode.add_argument("--concurrency", type=int, metavar="N", help=f"requests running at any time{usual}")
    mode.add_argument("--all-at-once", action="store_true", help="send everything at the start")
    mode.add_argument(
        "--users", type=int, metavar="N", help="users who begin at once, each with a conversation of --turns"
    )
    parser.add_argument(
        "--turns", type=int, default=8, help="of a conversation: each prompt is all said before and more (default: 8)"
    )
    parser.add_argument(
        "--think-s", type=float, default=0.0, help="mean time from a reply to its user's next turn (default: 0)"
    )
    parser.add_argument(
        "--burstiness",
        type=float,
        default=1.0,
        metavar="B",
        help="of --rate: below 1 for bursts (default: 1)",
    )
    parser.add_argument("--num-prompts", type=int, default=100, help="requests a round, but for --users (default: 100)")
    parser.add_argument("--rounds", type=int, default=1, help="times each server gets its turn (default: 1)")
    parser.add_argument("--warmup", type=int, default=8, metavar="N", help="uncounted requests first (default: 8)")
    parser.add_argument(
        "--beside",
        type=_type(Stream.parse),
        metavar="RATE:INPUT/OUTPUT",
        help="another stream, such as 20:128/8, kept apart",
    )


def _add_prompt_flags(parser: argparse.ArgumentParser, vocab_size: int) -> None:
    parser.add_argument(
        "--input-len", type=int, default=1024, help="prompt tokens, of a turn's or after a prefix (default: 1024)"
    )
    parser.add_argument("--output-len", type=int, default=128, help="output tokens (default: 128)")
    parser.add_argument(
        "--input-range", type=_type(_draw), metavar="DRAWN", help="prompt tokens: LOW-HIGH, or ~MEAN (heavy-tailed)"
    )
    parser.add_argument("--output-range", type=_type(_draw), metavar="DRAWN", help="the same of output tokens")
    parser.add_argument(
        "--prefixes",
        type=_type(Prefixes.parse),
        metavar="COUNTxTOKENS",
        help="prompts and conversations begin with one of so many prefixes, in turn",
    )
    parser.add_argument(
        "--zipf", type=float, metavar="S", help="draw the k-th prefix as often as 1/k^S instead of in turn"
    )
    parser.add_argument("--primed", action="store_true", help="send each prefix by itself before a round, uncounted")
    parser.add_argument(
        "--crowd-out",
        type=int,
        default=0,
        metavar="TOKENS",
        help="of other prompts are sent after the prefixes, uncounted, so that a server has no room for these any more",
    )
    parser.add_argument(
        "--structured",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="of the replies are held to a JSON schema: 0 to 1",
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="of replies (default: 0, the likeliest token)")
    parser.add_argument("--top-p", type=float, default=1.0, help="of replies with a temperature (default: 1)")
    parser.add_argument(
        "--vocab-size", type=int, default=vocab_size, help="prompt ids are below this (default: %(default)s)"
    )
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="PATH",
        help="send texts instead of ids, of as many words that are one token each to the tokenizer of this directory "
        "or GGUF file",
    )
    parser.add_argument("--prompt-file", type=Path, help="texts instead of random ids: one a line, or JSONL")
    parser.add_argument(
        "--seed", type=int, default=0, help="another one draws other prompts, which no prefix cache knows (default: 0)"
    )


def _add_result_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--slo", type=_type(parse_slo), default={}, help="limits in ms for goodput: ttft=200,tpot=20,e2e=5000"
    )
    parser.add_argument("--allow-errors", action="store_true", help="exit 0 even if requests failed")
    parser.add_argument("--results", type=Path, help="file to append a row a run to")
    parser.add_argument(
        "--plot", type=_type(_picture), metavar="FILE", help="draw what was seen there: .svg, .png, .pdf"
    )
    parser.add_argument("--workload", help="name of the workload in the results (default: made from the flags)")
    parser.add_argument("--hardware", help="in the results (default: the GPU's name, or the CPU's)")


def _type(parse: Callable[[str], Parsed]) -> Callable[[str], Parsed]:
    """Wrap `parse` for argparse, which otherwise hides the message of a ValueError."""

    def parsed(text: str) -> Parsed:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parsed


def _first_line(path: str) -> str:
    try:
        content = read_plain(path, MAX_KEY_CHARS)
    except OSError as error:
        raise ValueError(f"{path!r}: {error.strerror}") from None
    line = content.partition(b"\n")[0].strip().decode("utf-8", "replace")
    if not (line and line.isascii() and line.isprintable()):
        raise ValueError(f"{path!r}: its first line is no API key")
    return line


def _picture(text: str) -> Path:
    if Path(text).suffix not in (".svg", ".png", ".pdf"):
        raise ValueError(f"{text!r}: a file that ends with .svg, .png or .pdf")
    return Path(text)


def _draw(text: str) -> Draw:
    if text.startswith("~") and text[1:].isdigit() and int(text[1:]):
        return HeavyTailed(int(text[1:]))
    low, _, high = text.partition("-")
    if not (low.isdigit() and high.isdigit() and 0 < int(low) <= int(high)):
        raise ValueError(f"{text!r}: two lengths or a mean, for example 100-2000 or ~2000")
    return Even(int(low), int(high))
