"""Gains by role changes on the phases of `flip`, by the simulator of `baton plan`.

    python -m benchmarks.flip_simulated --layouts 2P2D,3P1D,1P3D,4P4D --gpus 4 --phases 64x8000/32,600x128/512

A server with fixed roles keeps to the row of its layout in all phases. A server that follows the load moves to the row
of each phase's layout. Neither the time of a change nor the decision about a change is simulated.
"""

import argparse
import sys

from rich.console import Console
from rich.table import Table

from benchmarks.flip import Phase, parse_phases
from common.base.errors import ConfigError
from deploy.planning.simulation.layout import Layout, parse_layout
from deploy.planning.simulation.loads import streams
from deploy.planning.simulation.outcome import Outcome
from deploy.planning.simulation.simulator import simulate
from deploy.planning.step_times.costs import Costs
from deploy.planning.step_times.rates import read_rates

REQUESTS_A_STREAM = 4
SHOWN = ("ttft_p50", "ttft_p99", "tpot_p50", "itl_p99")


def played(layout: Layout, costs: Costs, phase: Phase) -> Outcome:
    """Simulate the streams of a phase on workers with fixed roles."""
    lengths = [(phase.num_inputs, phase.num_outputs)] * (phase.num_streams * REQUESTS_A_STREAM)
    return simulate(layout, costs, streams(phase.num_streams, lengths))


def table(layouts: list[Layout], costs: Costs, phases: list[Phase]) -> Table:
    """Make a row for each phase and each choice of roles."""
    shown = Table("phase", "roles", "requests/s", "output tokens/s", *(f"{name}, ms" for name in SHOWN))
    for phase in phases:
        for layout in layouts:
            outcome = played(layout, costs, phase)
            rate = outcome.tokens_per_s
            cells = [
                f"{rate / phase.num_outputs:,.1f}",
                f"{rate:,.0f}",
                *(f"{outcome.figure(name):,.1f}" for name in SHOWN),
            ]
            shown.add_row(str(phase), layout.name, *cells)
    return shown


def parse_args(argv: list[str]) -> argparse.Namespace:
    description = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.flip_simulated", description=description)
    parser.add_argument("--layouts", default="2P2D,3P1D,1P3D,4P4D", help="roles to compare (default: %(default)s)")
    parser.add_argument("--gpus", type=int, default=4, help="of each of them (default: %(default)s)")
    parser.add_argument("--phases", default="64x8000/32,600x128/512", help="as of flip (default: %(default)s)")
    parser.add_argument(
        "--rates", default="h200-qwen3-4b", help="of deploy/planning/step_times/measured (default: %(default)s)"
    )
    args = parser.parse_args(argv)
    try:
        args.phases = parse_phases(args.phases)
        args.layouts = [parse_layout(text, args.gpus) for text in args.layouts.split(",")]
    except (ValueError, ConfigError) as error:
        parser.error(str(error))
    return args


def main(argv: list[str]) -> int:
    args = parse_args(argv)
    Console(width=140).print(table(args.layouts, Costs(read_rates(args.rates)), args.phases))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
