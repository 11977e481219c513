"""`baton trace`: merge the parts of a trace, and print a summary."""

import argparse
import math
from pathlib import Path

from common.settings.argument_parser import Commands
from common.settings.limits import DAY_S
from common.settings.options import number
from deploy.trace.merge import write_trace
from deploy.trace.parts import read_parts
from deploy.trace.summary import summary

FILE = "trace.json.gz"


def add_trace(commands: Commands) -> None:
    parser = commands.add_parser(
        "trace",
        help="merge and sum up what the workers of baton serve --trace DIR wrote",
        description="Merge the steps that each worker traced into one file for https://ui.perfetto.dev, and say how "
        "busy workers and devices were. While they still serve it shows what was written until a fraction of a second "
        "ago.",
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


def trace(args: argparse.Namespace) -> int:
    """Run the command; return exit status 0. Raises ConfigError if nothing can be shown or written."""
    parts, problems = read_parts(args.directory, args.last_s)
    print(summary(parts, problems))
    path = args.out or args.directory / FILE
    num_events = write_trace(parts, path)
    print(f"\n{num_events:,} events in {path}: open it at https://ui.perfetto.dev")
    return 0
