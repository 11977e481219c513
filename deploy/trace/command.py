"""`baton trace`: merge the parts of a trace, and print a summary."""

import argparse
import math
from pathlib import Path

from common.settings.argument_parser import Commands
from common.settings.limits import DAY_S
from common.settings.options import number
from deploy.trace.merge import write_trace
from deploy.trace.parts import read_parts
from deploy.trace.request import request_ways
from deploy.trace.summary import summary

FILE = "trace.json.gz"


def add_trace(commands: Commands) -> None:
    parser = commands.add_parser(
        "trace",
        help="merge and sum up what the processes of baton serve --trace DIR wrote",
        description="Merge what each process traced into one file for https://ui.perfetto.dev, in which the flow of a "
        "request leads from the router's queue through the steps of its workers back to the router; and say how busy "
        "processes were, what requests waited for, and which were slowest. While they still serve it shows what was "
        "written until a fraction of a second ago.",
        allow_abbrev=False,
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="that was given to --trace")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help=f"where to write the trace, .json or .json.gz (default: DIR/{FILE})"
    )
    parser.add_argument(
        "--last-s",
        type=number(float, 0.001, DAY_S),
        default=math.inf,
        metavar="S",
        help=f"only what ended in the last seconds that were traced (0.001 to {DAY_S:.0f}, default: all)",
    )
    parser.add_argument(
        "--request",
        metavar="ID",
        help="show the way of one request instead: its id as in the log, that of its response, or its X-Request-Id",
    )


def trace(args: argparse.Namespace) -> int:
    """Run the command; return exit status 0. Raises ConfigError if nothing can be shown or written."""
    recording = read_parts(args.directory, args.last_s)
    if args.request:
        print(request_ways(recording, args.request))
    else:
        print(summary(recording))
    if args.out or not args.request:
        path = args.out or args.directory / FILE
        num_events = write_trace(recording, path)
        print(f"\n{num_events:,} events in {path}: open it at https://ui.perfetto.dev")
    return 0
