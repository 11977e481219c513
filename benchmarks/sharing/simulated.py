"""Turns on a shared GPU, by the simulator of `baton plan`: figures of loads under each target of pauses.

    python -m benchmarks.sharing.simulated [--itl-ms 25,50,100,250] [--ttft-ms 100]

Prints a row without turns for each load: prompts keep to their share there. The others are by
`common/serving/turns/law.py`. Rates are those of the planner, and forecasts are never wrong. The second table has eight
streams beside a client that sends more prompts than the GPU computes: another client, or the same.
"""

import argparse
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from benchmarks.simulated import RATES, load_of
from common.base.percentiles import percentile
from common.settings.slo_section import SloSection
from deploy.planning.simulation.layout import parse_layout
from deploy.planning.simulation.loads import Arrival, Load
from deploy.planning.simulation.simulator import simulate
from deploy.planning.step_times.costs import Costs
from deploy.planning.step_times.rates import read_rates

LOADS = {
    "16 req/s, 1024/128": "--rate 16 --num-prompts 256",
    "32 req/s, 1024/128": "--rate 32 --num-prompts 512",
    "64 streams, 1024/128": "--concurrency 64 --num-prompts 320",
    "512 at once, 1024/128": "--all-at-once --num-prompts 512",
    "8 req/s, 4096/256": "--rate 8 --num-prompts 256 --input-len 4096 --output-len 256",
    "4 streams, 30000/128": "--concurrency 4 --num-prompts 24 --input-len 30000",
    "256 streams, 128/512": "--concurrency 256 --num-prompts 1024 --input-len 128 --output-len 512",
}
STREAMS, FLOOD = "streams", "flood"
SHOWN = ("ttft_p50", "ttft_p99", "tpot_p50", "itl_p99")


def table(costs: Costs, all_targets: Sequence[SloSection]) -> Table:
    """Make a row for each load and each pair of targets."""
    layout = parse_layout("1P1D", 1)
    shown = Table("load", "pauses, ms", *(f"{name}, ms" for name in SHOWN), "output tokens/s")
    for name, flags in LOADS.items():
        load = load_of(f"python -m benchmarks.serve --url http://127.0.0.1 {flags}")
        for targets in all_targets:
            outcome = simulate(layout, costs, load, targets=targets)
            figures = (f"{outcome.figure(figure):,.1f}" for figure in SHOWN)
            shown.add_row(name, _told(targets), *figures, f"{outcome.tokens_per_s:,.0f}")
    return shown


def flood(client: str) -> Load:
    """Return eight streams of a client, and 100 prompts a second of `client` for 15 seconds."""
    streams = [Arrival(0.0, 1024, 3000, client=STREAMS) for _ in range(8)]
    return Load([*streams, *(Arrival(500.0 + 10.0 * k, 1024, 1, client=client) for k in range(1500))])


def neighbours(costs: Costs, all_targets: Sequence[SloSection]) -> Table:
    """Make rows of streams beside a flood of prompts."""
    layout = parse_layout("1P1D", 1)
    shown = Table("8 streams beside 100 prompts/s of", "pauses, ms", "a stream's tokens/s", "TTFT p50, ms", "p99, ms")
    for name, client in ("another client", FLOOD), ("the same client", STREAMS):
        for targets in all_targets:
            requests = simulate(layout, costs, flood(client), targets=targets).requests
            tpot_ms = percentile((each.tpot_ms for each in requests if each.num_outputs > 1), 50)
            ttft_ms = [each.ttft_ms for each in requests if each.num_outputs == 1]
            waits = (f"{percentile(ttft_ms, point):,.0f}" for point in (50, 99))
            shown.add_row(name, _told(targets), f"{1e3 / tpot_ms:,.0f}", *waits)
    return shown


def _told(targets: SloSection) -> str:
    return f"{targets.itl_ms:g}" if targets.itl_ms else "no turns"


def parse_args(argv: list[str]) -> argparse.Namespace:
    description = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sharing.simulated", description=description)
    parser.add_argument("--itl-ms", default="25,50,100,250", help="targets of pauses (default: %(default)s)")
    parser.add_argument("--ttft-ms", type=float, default=100.0, help="of first tokens (default: %(default)g)")
    parser.add_argument("--rates", default=RATES, help="as of baton plan (default: %(default)s)")
    args = parser.parse_args(argv)
    try:
        args.itl_ms = [float(part) for part in args.itl_ms.split(",")]
    except ValueError as error:
        parser.error(f"--itl-ms: {error}")
    return args


def main(argv: list[str]) -> int:
    args = parse_args(argv)
    all_targets = [SloSection(itl_ms=0.0), *(SloSection(itl_ms, args.ttft_ms) for itl_ms in args.itl_ms)]
    costs = Costs(read_rates(args.rates))
    Console(width=140).print(table(costs, all_targets), neighbours(costs, all_targets))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
