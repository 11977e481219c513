"""Flags of `baton serve --autoscale`, and checks for fleets without possible changes."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from common.base.errors import ConfigError
from common.settings.limits import DAY_S
from common.settings.options import number
from deploy.autoscale.judge import LEAST_RETRY_S, NUM_WINDOWS, Pace
from deploy.processes.placement import Placement

SHORTEST_WINDOW_S, LONGEST_WINDOW_S = 1.0, 3600.0
LONGEST_STEP_MS = 60_000.0
FEWEST_WORKERS = 3


@dataclass(frozen=True, slots=True)
class AutoscaleOptions:
    """Pace of role changes, and the longest acceptable decode step; 0: no limit."""

    pace: Pace
    longest_step_ms: float = 0.0


def add_autoscale(parser: argparse.ArgumentParser) -> None:
    """Add `--autoscale` and related flags."""
    usual = Pace()
    parser.add_argument(
        "--autoscale",
        action="store_true",
        help="have workers change between prefill and decode on their devices when the mix of the load shifts: when "
        "one role has too little and the other can spare a worker, as measured. One of each stays; nothing that runs "
        "is lost. It wants three workers at least, and is for GPUs that have one each (default: off)",
    )
    parser.add_argument(
        "--autoscale-window-s",
        type=number(float, SHORTEST_WINDOW_S, LONGEST_WINDOW_S),
        metavar="S",
        help=f"{NUM_WINDOWS} windows of so long have to agree, one after the other, before a role changes "
        f"({SHORTEST_WINDOW_S:g} to {LONGEST_WINDOW_S:g}, default: {usual.window_s:g})",
    )
    parser.add_argument(
        "--autoscale-cooldown-s",
        type=number(float, 0.0, DAY_S),
        metavar="S",
        help="roles stay for so long after a change, for twice as long after one that undid the last one soon or "
        f"failed, after that {LEAST_RETRY_S:g} s at least, and so on up to an hour (0 to {DAY_S:.0f}, default: "
        f"{usual.cooldown_s:g})",
    )
    parser.add_argument(
        "--autoscale-step-ms",
        type=number(float, 0.0, LONGEST_STEP_MS),
        metavar="MS",
        help="decode has too little, too, when its steps take about so long; 0: only when rows or KV blocks are used "
        f"up (0 to {LONGEST_STEP_MS:.0f}, default: 0)",
    )


def autoscale_of(args: argparse.Namespace, num_prefill: int, num_decode: int) -> AutoscaleOptions | None:
    """Return the chosen options; None without `--autoscale`. Raises ConfigError if no role could ever change."""
    given = {
        name: value
        for name in ("window_s", "cooldown_s", "step_ms")
        if (value := getattr(args, f"autoscale_{name}")) is not None
    }
    if not args.autoscale:
        if given:
            flag = f"--autoscale-{next(iter(given)).replace('_', '-')}"
            raise ConfigError(f"{flag} does nothing without --autoscale; add that, or leave {flag} out")
        return None
    if not num_prefill:
        raise ConfigError(
            "--autoscale without prefill workers (--prefill 0, or kv.transport = none): there are no roles to change; "
            "leave one of the two out"
        )
    if num_prefill + num_decode < FEWEST_WORKERS:
        raise ConfigError(
            f"--autoscale with {num_prefill} prefill and {num_decode} decode worker: one of each stays, so none can "
            f"change; start {FEWEST_WORKERS} workers at least (--prefill, --decode), or leave --autoscale out"
        )
    usual = Pace()
    pace = Pace(given.get("window_s", usual.window_s), given.get("cooldown_s", usual.cooldown_s))
    return AutoscaleOptions(pace, given.get("step_ms", 0.0))


def little_to_change(placements: Sequence[Placement]) -> str:
    """Return why roles will hardly change on these devices; empty if changes make sense."""
    gpus = {each.gpu for each in placements}
    if None in gpus or len(gpus) > 1:
        return ""
    return (
        "--autoscale on one GPU: both roles have it already, and share it by the moment. A decode worker more adds "
        "rows, a prefill worker more adds nothing"
    )
