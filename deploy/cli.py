"""The `baton` command. Imports no torch: the supervisor stays small and starts at once."""

import argparse
import asyncio
import contextlib
import json
import os
import re
import socket
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from common.base.errors import ConfigError
from common.base.log import StartLog
from common.base.version import VERSION
from common.settings.argument_parser import ArgumentParser, Commands
from common.settings.config import MEMORY_SECTIONS, ROUTER_SECTIONS, WORKER_SECTIONS, Config
from common.settings.limits import DAY_S
from common.settings.options import add_flags, from_flags, number
from common.wire.messages.frames import WIRE_NAME
from deploy.autoscale.options import add_autoscale, autoscale_of
from deploy.operate.draining import USUAL_PORT, drain, drain_all, router_of
from deploy.operate.fleet_table import fleet_table
from deploy.operate.healthcheck import NOT_OURS, OTHERS_ANSWER, SERVING, fetch, wait_until_ready
from deploy.planning.flags import add_plan, plan
from deploy.processes.early import Early
from deploy.processes.machine import shortage
from deploy.serve.command import serve, with_model, with_port
from deploy.serve.fleet_options import add_fleet, add_joining, fleet_of, joining_fleet_of
from deploy.serve.front import add_front, front
from deploy.serve.join import join
from deploy.serve.model_source import model_in
from deploy.serve.warm import add_warm, warm
from deploy.trace.command import add_trace, trace

INTERRUPTED, UNREAD = 130, 141
"""Exit statuses of programs ended by SIGINT or SIGPIPE in a shell."""
ALL_SECTIONS = tuple(dict.fromkeys(ROUTER_SECTIONS + WORKER_SECTIONS + MEMORY_SECTIONS))


def main(early: Early | None = None) -> None:
    """Run a command and exit; `early` is a fork server begun for `baton serve`, which ends with this process.

    Exit status: 0 after a clean drain, 1 after a failure, 2 for a wrong setting. An early Ctrl-C gives 130, a lost
    reader of the output 141.
    """
    try:
        status = _run(early)
    except ConfigError as error:
        status = _complain(str(error), 2)
    except KeyboardInterrupt:
        status = _complain("interrupted", INTERRUPTED)
    except BrokenPipeError:  # the reader has gone, as behind `| head`
        status = UNREAD
    except (MemoryError, OSError, RuntimeError) as error:
        if not (reason := shortage(error)):
            raise
        status = _complain(reason, 1)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # buffered output is lost
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    sys.exit(status)


def _run(early: Early | None) -> int:
    args = build_parser().parse_args()
    args.early = early
    status = COMMANDS[args.command](args)
    sys.stdout.flush()
    return status


def _complain(text: str, status: int) -> int:
    """Print a line to stderr if possible; otherwise only the exit status tells."""
    with contextlib.suppress(OSError):
        print(f"baton: {text}", file=sys.stderr, flush=True)
    return status


def build_parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(prog="baton", description="Disaggregated LLM serving on the machine you have.")
    parser.add_argument("--version", action="version", version=f"baton {VERSION}, wire {WIRE_NAME}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_serve(commands)
    _add_join(commands)
    _add_demo(commands)
    _add_workers(commands)
    _add_drain(commands)
    _add_bench(commands)
    add_trace(commands)
    add_plan(commands)
    add_warm(commands)
    add_front(commands)
    return parser


def _add_serve(commands: Commands) -> None:
    parser = commands.add_parser(
        "serve",
        usage="baton serve MODEL [option ...]",
        help="serve a model: one router, prefill workers and decode workers",
        description="Start and watch one router, prefill workers and decode workers on this machine, and a memory "
        "server for each device, at which its workers share one copy of the weights and one pool of KV blocks: on a "
        "GPU they take --kv-memory-fraction of it together.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "model.path",
        metavar="MODEL",
        help="model directory, GGUF file, or Hub id such as Qwen/Qwen3-4B; of a repository of GGUF files "
        "OWNER/NAME:FILE, or the end of a file's name, as in Qwen/Qwen3-4B-GGUF:Q4_K_M",
    )
    parser.add_argument(
        "--host", dest="router.host", metavar="ADDRESS", help="address that HTTP binds to (default: 127.0.0.1)"
    )
    parser.add_argument(
        "--port", dest="router.port", type=int, metavar="PORT", help="port that HTTP binds to (default: 8000)"
    )
    parser.add_argument(
        "--take-over",
        dest="router.take_over",
        action="store_const",
        const="auto",
        help="begin beside a baton serve of yours that has the port; when all is ready take it over, upon which that "
        "one finishes what it has, and ends",
    )
    parser.add_argument(
        "--trace",
        dest="trace.dir",
        metavar="DIR",
        help="every worker writes the times of its steps there, for baton trace DIR (default: none does)",
    )
    add_fleet(parser)
    add_autoscale(parser)
    add_flags(parser, Config, ALL_SECTIONS)


def _add_join(commands: Commands) -> None:
    parser = commands.add_parser(
        "join",
        usage="baton join MODEL --net-router-endpoint tcp://HOST:PORT --net-secret-file FILE --net-advertise HOST "
        "(--prefill N | --decode N) [option ...]",
        help="workers of this machine for the router of another",
        description="Start and watch workers and memory servers on this machine, for a router on another with the same "
        "model and secret. Ctrl-C finishes what they have, and ends.",
        allow_abbrev=False,
    )
    parser.add_argument("model.path", metavar="MODEL", help="as of baton serve")
    add_joining(parser)
    add_flags(parser, Config, tuple(dict.fromkeys(WORKER_SECTIONS + MEMORY_SECTIONS)))


def _add_demo(commands: Commands) -> None:
    parser = commands.add_parser(
        "demo",
        help="serve the bundled model, stream one verse, show the figures",
        description="Serve the bundled model, stream one verse, show how long it took, and end.",
        allow_abbrev=False,
    )
    add_fleet(parser)
    parser.add_argument("--prompt", default="ROMEO:\nBut soft, what light", help="what the verse begins with")
    parser.add_argument(
        "--max-tokens", type=number(int, 1, 1_000_000), default=160, help="most tokens of the verse (default: 160)"
    )
    parser.add_argument("--seed", type=int, default=12, help="another one gives another verse (default: 12)")
    parser.set_defaults(config=None)


def _add_router(parser: argparse.ArgumentParser) -> None:
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--port", type=number(int, 1, 65535), help=f"HTTP port of a router on this machine (default: {USUAL_PORT})"
    )
    where.add_argument("--url", help="HTTP address of a router, as http://127.0.0.1:8000")


def _add_workers(commands: Commands) -> None:
    parser = commands.add_parser(
        "workers",
        help="who serves: role, device, load, KV blocks, version, since when",
        description="Print who serves behind a router, and what is wrong. Exit status 1 if no request is answered.",
        allow_abbrev=False,
    )
    _add_router(parser)
    parser.add_argument("--json", action="store_true", help="GET /health as it is")
    parser.add_argument(
        "--until-ready", action="store_true", help="wait until requests are answered, also for a router to be there"
    )
    parser.add_argument(
        "--timeout-s", type=number(float, 1.0, DAY_S), default=600.0, metavar="S",
        help=f"with --until-ready, wait for at most so long (1 to {DAY_S:.0f}, default: %(default)g)",
    )  # fmt: skip


def _add_drain(commands: Commands) -> None:
    parser = commands.add_parser(
        "drain",
        usage="baton drain (WORKER | --all) [option ...]",
        help="have a worker or memory server finish what it has, and end",
        description="Ask a router to send a worker nothing new, and wait until it has finished what it has and ended. "
        "Who started it decides what follows: baton serve, Docker and Kubernetes start another, so that one drain "
        "after the other is a rolling restart. Workers of a memory server that ends finish, and start again, too.",
        allow_abbrev=False,
    )
    who = parser.add_mutually_exclusive_group(required=True)
    who.add_argument("name", type=_name, nargs="?", metavar="WORKER", help="as baton workers shows it")
    who.add_argument(
        "--all", action="store_true", help="every worker, one after the other: a rolling restart; each has to be back"
    )
    _add_router(parser)
    parser.add_argument("--until-back", action="store_true", help="wait for another under its name, too")
    parser.add_argument(
        "--timeout-s",
        type=number(float, 1.0, DAY_S),
        default=300.0,
        metavar="S",
        help=f"wait for at most so long (1 to {DAY_S:.0f}, default: %(default)g)",
    )
    add_flags(parser, Config, ("net",))


def _name(text: str) -> str:
    """Check a worker name; a router would silently drop a message with a bad name."""
    if not re.fullmatch(r"[!-~]{1,100}", text):
        raise argparse.ArgumentTypeError(f"{text!r:.40}: 1 to 100 ASCII characters, as baton workers shows it")
    return text


def _add_bench(commands: Commands) -> None:
    """Add the `bench` command; all flags go unparsed to the load client."""
    parser = commands.add_parser(
        "bench",
        prefix_chars="\0",
        add_help=False,
        help="load an OpenAI-compatible server and show what a client sees; baton bench --help has its flags",
    )
    parser.add_argument("flags", nargs="*")


def _serve(args: argparse.Namespace) -> int:
    start = StartLog()
    start.ended("imports")
    config = from_flags(Config, args)
    fleet = fleet_of(args, config)
    fleet = replace(fleet, autoscale=autoscale_of(args, fleet.num_prefill, fleet.num_decode))
    config = with_port(with_model(config, config.model.path))
    start.ended("model")
    return asyncio.run(serve(config, fleet, start, args.early))


def _join(args: argparse.Namespace) -> int:
    start = StartLog()
    start.ended("imports")
    config = from_flags(Config, args)
    fleet = joining_fleet_of(args, config)
    config = with_model(config, config.model.path)
    start.ended("model")
    return asyncio.run(join(config, fleet, args.name or socket.gethostname(), start))


def _demo(args: argparse.Namespace) -> int:
    from deploy.serve.demo import DEMO_MODEL, Verse, demo

    config = from_flags(Config, args)
    config = replace(config, router=replace(config.router, port=0))
    verse = Verse(args.prompt, args.max_tokens, args.seed)
    config = with_port(with_model(config, str(DEMO_MODEL)))
    return asyncio.run(demo(config, fleet_of(args, config), verse))


def _workers(args: argparse.Namespace) -> int:
    url = f"http://127.0.0.1:{args.port or USUAL_PORT}" if args.url is None else args.url.rstrip("/")
    if args.until_ready and (problem := wait_until_ready(url, args.timeout_s)):
        print(f"baton: not ready after {args.timeout_s:g} s: {problem}", file=sys.stderr)
        return 1
    try:
        health = fetch(url)
        shown, is_ok = fleet_table(health), health["status"] in SERVING
    except (OSError, ValueError, *NOT_OURS) as error:
        why = OTHERS_ANSWER if isinstance(error, NOT_OURS) else getattr(error, "reason", error)
        print(f"baton: no router answers at {url}: {why}; name its --port or --url", file=sys.stderr)
        return 1
    print(json.dumps(health, indent=2) if args.json else shown)
    return 0 if is_ok else 1


def _drain(args: argparse.Namespace) -> int:
    net, say = router_of(from_flags(Config, args).net, args.port, args.url), partial(print, flush=True)
    if args.all:
        return drain_all(net, args.timeout_s, say)
    return drain(net, args.name, args.timeout_s, say, until_back=args.until_back)


def _plan(args: argparse.Namespace) -> int:
    if args.model and Path(args.model).is_dir():
        args.model = str(model_in(Path(args.model)))
    return plan(args)


def _bench(args: argparse.Namespace) -> int:
    try:
        from deploy.bench.command import main as bench
        from deploy.bench.options import Defaults
    except ImportError as error:
        raise ConfigError(
            f"{error}: baton bench needs the bench extra: "
            'pip install -c constraints.txt -e ".[bench]" where the sources are'
        ) from None
    return bench(args.flags, "baton bench", Defaults(concurrency=8, vocab_size=1000))  # token ids of every model


COMMANDS = {
    "serve": _serve, "join": _join, "front": front, "demo": _demo, "workers": _workers, "drain": _drain,
    "bench": _bench, "trace": trace, "plan": _plan, "warm": warm,
}  # fmt: skip


if __name__ == "__main__":
    main()
