"""The `baton` command. Imports no torch: the supervisor stays small and starts at once."""

import argparse
import asyncio
import sys
from dataclasses import replace

from common.config import DECODE_SECTIONS, PREFILL_SECTIONS, ROUTER_SECTIONS, Config
from common.errors import ConfigError
from common.options import add_flags, from_flags
from deploy.demo import DEMO_MODEL, Verse, demo
from deploy.mps import DEFAULT_PREFILL_PERCENT, MODES, MpsOptions
from deploy.serve import Fleet, serve, with_model, with_port

ALL_SECTIONS = tuple(dict.fromkeys(ROUTER_SECTIONS + PREFILL_SECTIONS + DECODE_SECTIONS))


def main() -> None:
    """Entry point: 0 after a clean drain, 1 after a failure, 2 for a wrong setting, 130 for an early Ctrl-C."""
    args = build_parser().parse_args()
    try:
        sys.exit(_serve(args) if args.command == "serve" else _demo(args))
    except ConfigError as error:
        print(f"baton: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="baton", description="Disaggregated LLM serving on the machine you have.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_serve(commands)
    _add_demo(commands)
    return parser


def _add_serve(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "serve",
        usage="baton serve MODEL [option ...]",
        help="serve a model: one router, prefill workers and decode workers",
        description="Start and watch one router, prefill workers and decode workers on this machine. "
        "Workers on one GPU divide --kv-memory-fraction of it among themselves.",
        allow_abbrev=False,
    )
    parser.add_argument("model.path", metavar="MODEL", help="model directory, or Hub id such as Qwen/Qwen3-4B")
    parser.add_argument(
        "--host", dest="router.host", metavar="ADDRESS", help="address that HTTP binds to (default: 127.0.0.1)"
    )
    parser.add_argument(
        "--port", dest="router.port", type=int, metavar="PORT", help="port that HTTP binds to (default: 8000)"
    )
    _add_fleet(parser)
    add_flags(parser, Config, ALL_SECTIONS)


def _add_demo(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "demo",
        help="serve the bundled model, stream one verse, show the figures",
        allow_abbrev=False,
    )
    _add_fleet(parser)
    parser.add_argument("--prompt", default="ROMEO:\nBut soft, what light", help="what the verse begins with")
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--seed", type=int, default=7)
    parser.set_defaults(config=None)


def _add_fleet(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prefill", type=int, default=1, metavar="N", help="prefill workers (default: 1)")
    parser.add_argument("--decode", type=int, default=1, metavar="M", help="decode workers (default: 1)")
    parser.add_argument(
        "--device", dest="worker.device", metavar="DEVICE", help="auto, cpu, cuda or cuda:N (default: auto)"
    )
    parser.add_argument(
        "--gpus",
        default="",
        metavar="LIST",
        help="GPU indices, for example 0,1: prefill workers and then decode workers go round them (default: all)",
    )
    parser.add_argument(
        "--start-timeout-s",
        type=float,
        default=1800.0,
        metavar="S",
        help="give up when not ready by then (default: 1800)",
    )
    _add_mps(parser)


def _add_mps(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--mps",
        choices=MODES,
        default="auto",
        help="NVIDIA MPS where a prefill and a decode worker share a GPU: auto uses it if it is there, on insists on "
        "it, off starts none and caps nothing. A daemon of your own (CUDA_MPS_PIPE_DIRECTORY, or the default "
        "directory) is used as it is. A CUDA fault of one worker can take its neighbours under MPS down with it; "
        "they are started again (default: auto)",
    )
    parser.add_argument(
        "--mps-prefill-percent",
        type=int,
        default=DEFAULT_PREFILL_PERCENT,
        metavar="PERCENT",
        help="--prefill-sm-share of prefill workers on a shared GPU, so that decode steps stay short while a prompt "
        "runs; 0 is --mps off (default: %(default)s)",
    )


def _fleet(args: argparse.Namespace) -> Fleet:
    mps = MpsOptions(args.mps, args.mps_prefill_percent)
    return Fleet(args.prefill, args.decode, args.gpus, args.start_timeout_s, mps)


def _serve(args: argparse.Namespace) -> int:
    config = from_flags(Config, args)
    config = with_port(with_model(config, config.model.path))
    return asyncio.run(serve(config, _fleet(args)))


def _demo(args: argparse.Namespace) -> int:
    config = from_flags(Config, args)
    config = replace(config, router=replace(config.router, port=0))
    verse = Verse(args.prompt, args.max_tokens, args.seed)
    config = with_port(with_model(config, str(DEMO_MODEL)))
    return asyncio.run(demo(config, _fleet(args), verse))


if __name__ == "__main__":
    main()
