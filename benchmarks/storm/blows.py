"""Blows against workers and their times, drawn from a seed before the storm begins."""

import enum
import random
from collections.abc import Sequence
from dataclasses import dataclass


class Kind(enum.StrEnum):
    """A blow against a worker, or against the memory server."""

    KILL = enum.auto()  # SIGKILL, start after the pause
    DRAIN = enum.auto()  # SIGTERM, start after both the end and the pause
    STOP = enum.auto()  # SIGSTOP, SIGCONT after the pause
    REPLACE = enum.auto()  # start another worker of equal id; after the pause SIGTERM for the first
    OUST = enum.auto()  # like REPLACE, with SIGKILL
    FREEZE = enum.auto()  # SIGSTOP for the memory server, SIGCONT after 3 to 12 s; workers gone by then are started
    FORGET = enum.auto()  # SIGKILL for the memory server, start at once; all workers leave and start again


WEIGHTS = {
    Kind.KILL: 4,
    Kind.DRAIN: 3,
    Kind.STOP: 3,
    Kind.REPLACE: 1.5,
    Kind.OUST: 1.5,
    Kind.FREEZE: 1,
    Kind.FORGET: 0.5,
}
OF_MEMORY = (Kind.FREEZE, Kind.FORGET)
MEMORY = "memory"
"""The memory server, owner of all workers' memory."""
SHORT_PAUSE_S = 1.0
LONG_PAUSE_S = 6.0
"""Twice `net.worker_timeout_s`, so that some stopped workers are taken for dead."""
FREEZE_S = (3.0, 12.0)
"""Seconds of silence: from tolerable for a worker to more than a worker waits."""
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
    seed: int, duration_s: float, interval_s: float, prefills: Sequence[str], decodes: Sequence[str]
) -> list[Blow]:
    """Draw the blows of a storm, `interval_s` apart on average; the first blows are of each kind once."""
    rng = random.Random(seed)
    firsts = list(Kind)
    rng.shuffle(firsts)
    blows: list[Blow] = []
    at_s = rng.uniform(0.5, interval_s)
    while at_s < duration_s:
        [kind] = [firsts.pop()] if firsts else rng.choices(list(WEIGHTS), weights=list(WEIGHTS.values()))
        targets = (MEMORY,) if kind in OF_MEMORY else _targets(rng, prefills, decodes)
        blows.append(Blow(at_s, kind, targets, _pause_s(rng, kind)))
        at_s += rng.expovariate(1 / interval_s)
    return blows


def _pause_s(rng: random.Random, kind: Kind) -> float:
    if kind is Kind.FREEZE:
        return rng.uniform(*FREEZE_S)
    longest_s = rng.choice((SHORT_PAUSE_S, LONG_PAUSE_S)) if kind is Kind.STOP else 2 * SHORT_PAUSE_S
    return rng.uniform(0.0, longest_s)


def _targets(rng: random.Random, prefills: Sequence[str], decodes: Sequence[str]) -> tuple[str, ...]:
    draw = rng.random()
    if draw < ALL:
        return (*prefills, *decodes)
    if draw < ALL + ALL_OF_A_KIND:
        return tuple(rng.choice((prefills, decodes)))
    return (rng.choice((*prefills, *decodes)),)
