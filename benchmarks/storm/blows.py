"""Blows against workers, hosts and their network, and their times, drawn from a seed before the storm begins."""

import enum
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


class Kind(enum.StrEnum):
    """A blow against a worker, against a memory server, or against a host and its cable."""

    KILL = enum.auto()  # SIGKILL, start after the pause
    DRAIN = enum.auto()  # SIGTERM, start after both the end and the pause
    STOP = enum.auto()  # SIGSTOP, SIGCONT after the pause
    REPLACE = enum.auto()  # start another worker of equal id; after the pause SIGTERM for the first
    OUST = enum.auto()  # like REPLACE, with SIGKILL
    FREEZE = enum.auto()  # SIGSTOP for the memory server, SIGCONT after 3 to 12 s; workers gone by then are started
    FORGET = enum.auto()  # SIGKILL for the memory server, start at once; all workers leave and start again
    DELAY = enum.auto()  # frames are late until the pause is over, and so on
    LOSE = enum.auto()
    SLOW = enum.auto()
    REORDER = enum.auto()
    CUT = enum.auto()  # for a second
    LONG_CUT = enum.auto()  # for a minute
    DEAFEN = enum.auto()  # nothing reaches the host
    MUTE = enum.auto()  # nothing leaves the host
    VANISH = enum.auto()  # cut, SIGKILL for all of the host; after the pause the cable is mended, and all start again
    STILL = enum.auto()  # SIGSTOP for all of either host, SIGCONT after the pause


ONE_HOST = {
    Kind.KILL: 4,
    Kind.DRAIN: 3,
    Kind.STOP: 3,
    Kind.REPLACE: 1.5,
    Kind.OUST: 1.5,
    Kind.FREEZE: 1,
    Kind.FORGET: 0.5,
}
OF_WEATHER = {Kind.DELAY: 1.5, Kind.LOSE: 1.5, Kind.SLOW: 1.5, Kind.REORDER: 1.5}
OF_CABLE = {Kind.CUT: 2, Kind.LONG_CUT: 0.3, Kind.DEAFEN: 1.5, Kind.MUTE: 1.5}
OF_HOST = {Kind.VANISH: 1, Kind.STILL: 1}
OF_NETWORK = OF_WEATHER | OF_CABLE | OF_HOST
TWO_HOSTS = ONE_HOST | OF_NETWORK
"""Kinds, each with how often it comes beside the others."""
OF_MEMORY = (Kind.FREEZE, Kind.FORGET)
MEMORY = "memory"
"""The memory server, owner of all workers' memory; of two hosts, that of the router's."""
NETWORK = "network"
"""The other host and its cable, as a target."""
ROUTER_HOST = "the router's host"
"""The same, of a host that stands still."""
SHORT_PAUSE_S = 1.0
LONG_PAUSE_S = 6.0
"""Twice `net.worker_timeout_s`, so that some stopped workers are taken for dead."""
FREEZE_S = (3.0, 12.0)
"""Seconds of silence: from tolerable for a worker to more than a worker waits."""
BAD_WEATHER_S = (1.0, 8.0)
CUT_S, LONG_CUT_S = 1.0, 60.0
ALL_OF_A_KIND = 0.12
ALL = 0.04


@dataclass(frozen=True, slots=True)
class Blow:
    """A blow against processes, `at_s` seconds after the start."""

    at_s: float
    kind: Kind
    targets: tuple[str, ...]
    pause_s: float


def plan(
    seed: int,
    duration_s: float,
    interval_s: float,
    prefills: Sequence[str],
    decodes: Sequence[str],
    memories: Sequence[str] = (MEMORY,),
    kinds: Iterable[Kind] = ONE_HOST,
) -> list[Blow]:
    """Draw the blows of a storm, `interval_s` apart on average; the first blows are of each kind once."""
    rng = random.Random(seed)
    weights = {kind: TWO_HOSTS[kind] for kind in kinds}
    firsts = list(weights)
    rng.shuffle(firsts)
    blows: list[Blow] = []
    at_s = rng.uniform(0.5, interval_s)
    while at_s < duration_s:
        [kind] = [firsts.pop()] if firsts else rng.choices(list(weights), weights=list(weights.values()))
        if kind in OF_NETWORK:
            targets: tuple[str, ...] = (rng.choice((NETWORK, ROUTER_HOST)) if kind is Kind.STILL else NETWORK,)
        else:
            targets = (rng.choice(memories),) if kind in OF_MEMORY else _targets(rng, prefills, decodes)
        blows.append(Blow(at_s, kind, targets, _pause_s(rng, kind)))
        at_s += rng.expovariate(1 / interval_s)
    return blows


def _pause_s(rng: random.Random, kind: Kind) -> float:
    match kind:
        case Kind.CUT:
            return CUT_S
        case Kind.LONG_CUT:
            return LONG_CUT_S
        case Kind.FREEZE:
            return rng.uniform(*FREEZE_S)
        case Kind.STOP:
            return rng.uniform(0.0, rng.choice((SHORT_PAUSE_S, LONG_PAUSE_S)))
        case _ if kind in OF_NETWORK:
            return rng.uniform(*BAD_WEATHER_S)
        case _:
            return rng.uniform(0.0, 2 * SHORT_PAUSE_S)


def _targets(rng: random.Random, prefills: Sequence[str], decodes: Sequence[str]) -> tuple[str, ...]:
    draw = rng.random()
    if draw < ALL:
        return (*prefills, *decodes)
    if draw < ALL + ALL_OF_A_KIND:
        return tuple(rng.choice((prefills, decodes)))
    return (rng.choice((*prefills, *decodes)),)
