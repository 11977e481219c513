"""Reader of the parts of a trace: the files of all processes, as far as readable.

A killed process may leave a cut last line, and a file may come from any program. Lines other than our events are
skipped and counted.
"""

import json
import math
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeGuard

from common.base.errors import ConfigError
from common.base.json_file import Json, JsonObject
from common.base.plain_file import open_plain
from common.base.trace_file import OLDER, PROCESS, SUFFIX

ROLES = ("router", "prefill", "decode")
"""Roles in the order met by a request, also the order of processes in a trace."""
MAX_LINE_CHARS = 1 << 20
"""Limit of a line, several times the longest line written."""
MAX_TIME = 1e17
"""Limit of times in microseconds: some thousand years."""
MAX_DIGITS = 20
"""Limit of an integer; an epoch has 63 bits."""


NOTHING: JsonObject = {}
"""Shared arguments of slices without any, because there are millions."""


class Slice(NamedTuple):
    """A slice on a track of its process; times in microseconds."""

    ts: float
    dur: float
    track: int
    name: str
    args: JsonObject

    @property
    def end(self) -> float:
        return self.ts + self.dur


class Point(NamedTuple):
    """A point at which a flow leads through the slice on the track."""

    ts: float
    track: int
    flow_id: str


@dataclass(slots=True)
class Part:
    """Events of an incarnation of a process, in order of time; slices before slices inside."""

    role: str
    id: str
    epoch: int
    pid: int
    host: str
    boot: str
    unix_minus_monotonic_us: float
    slices: list[Slice] = field(default_factory=list)
    points: list[Point] = field(default_factory=list)

    def on(self, track: int, name: str) -> list[Slice]:
        return [each for each in self.slices if each.track == track and each.name == name]


@dataclass(slots=True)
class Recording:
    """All parts, on a common clock, and unreadable lines or files."""

    parts: list[Part]
    skipped: list[str]

    @property
    def begin(self) -> float:
        """Time of the first event."""
        return min(part.slices[0].ts for part in self.parts)


def read_parts(directory: Path, last_s: float = math.inf) -> Recording:
    """Return the traces in a directory, or their last seconds; raises ConfigError if there are none."""
    if not directory.is_dir():
        raise ConfigError(f"{directory}: no such directory; name the one that was given to --trace")
    paths = sorted(directory.glob(f"*{SUFFIX}"), key=lambda path: (not path.name.endswith(OLDER), path.name))
    parts: dict[tuple[str, str, int], Part] = {}
    skipped: list[str] = []
    clock: Part | None = None
    for path in paths:
        read, problem = _read(path)
        if problem:
            skipped.append(f"{path.name}: {problem}")
        if read is None:
            continue
        clock = clock or read
        if read.boot != clock.boot:  # another boot or machine: align by the wall clock
            late_us = read.unix_minus_monotonic_us - clock.unix_minus_monotonic_us
            read.slices = [each._replace(ts=each.ts + late_us) for each in read.slices]
            read.points = [each._replace(ts=each.ts + late_us) for each in read.points]
        part = parts.setdefault((read.role, read.id, read.epoch), read)
        if part is not read:
            part.slices += read.slices
            part.points += read.points
    if not any(part.slices for part in parts.values()):
        why = "; ".join(skipped) or ("nothing has happened yet" if paths else f"no {SUFFIX} file")
        raise ConfigError(f"{directory}: nothing was traced there ({why}); name the one that was given to --trace")
    end = max(each.end for part in parts.values() for each in part.slices)
    return Recording(_in_order(parts.values(), end - last_s * 1e6), skipped)


def _in_order(parts: Iterable[Part], since: float) -> list[Part]:
    """Return parts from the router on, with events by time, without events before `since`."""
    found = []
    for part in parts:
        if since > -math.inf:
            part.slices = [each for each in part.slices if each.end >= since]
            part.points = [each for each in part.points if each.ts >= since]
        if part.slices:
            found.append(part)
        part.slices.sort(key=lambda each: (each.ts, -each.dur))
        part.points.sort()
    ranks = {role: rank for rank, role in enumerate(ROLES)}
    return sorted(found, key=lambda part: (ranks.get(part.role, len(ROLES)), part.id, part.slices[0].ts))


def _read(path: Path) -> tuple[Part | None, str]:
    """Return a file's part, and the skipped lines in words."""
    part, bad = None, []
    try:
        for number, text in _lines(path):
            event = _parsed(text)
            if part is None:
                part = _header(event)
                if part is None:
                    return None, "skipped, as it does not begin with whose it is"
            elif isinstance(event, dict) and (found := _slice(event)) is not None:
                part.slices.append(found)
            elif isinstance(event, dict) and (point := _point(event)) is not None:
                part.points.append(point)
            else:
                bad.append((number, not text.endswith("\n")))
    except OSError as error:
        return None, f"skipped: {error.strerror}"
    return (part, _told(bad)) if part is not None else (None, "skipped, as it is empty")


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield numbered lines; a piece of an overlong line counts as a line. Raises OSError."""
    with open(path, encoding="utf-8", errors="replace", opener=open_plain) as file:
        yield from enumerate(iter(partial(file.readline, MAX_LINE_CHARS), ""), 1)


def _told(bad: list[tuple[int, bool]]) -> str:
    if not bad:
        return ""
    number, is_cut = bad[0]
    if len(bad) == 1 and is_cut:
        return "its last line is cut"
    return f"{len(bad)} lines skipped that are no events, the first is line {number}"


def _parsed(text: str) -> Json:
    try:
        return json.loads(text, parse_int=_whole, parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError):
        return None


def _whole(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(text)
    return int(text)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def _header(event: Json) -> Part | None:
    try:
        args = event["args"]
        unix_s, monotonic_s, epoch, pid = (args[key] for key in ("unix_s", "monotonic_s", "epoch", "pid"))
        names = [args[key] for key in ("role", "id", "host", "boot")]
        is_ours = event["name"] == PROCESS and all(isinstance(name, str) for name in names)
    except (TypeError, KeyError):
        return None
    if not is_ours or not all(map(_is_time, (unix_s, monotonic_s))):
        return None
    if not isinstance(epoch, int) or not isinstance(pid, int):
        return None
    role, name, host, boot = names
    return Part(role, name, epoch, pid, host, boot, (unix_s - monotonic_s) * 1e6)


def _slice(event: JsonObject) -> Slice | None:
    ts, dur, track, name, args = (event.get(key) for key in ("ts", "dur", "tid", "name", "args"))
    if event.get("ph") != "X" or not _is_time(ts) or not _is_time(dur):
        return None
    if not isinstance(track, int) or not isinstance(name, str) or not isinstance(args, dict | None):
        return None
    return Slice(ts, dur, track, sys.intern(name), args or NOTHING)


def _point(event: JsonObject) -> Point | None:
    ts, track, flow_id = (event.get(key) for key in ("ts", "tid", "id"))
    if event.get("ph") != "t" or not _is_time(ts) or not isinstance(track, int) or not isinstance(flow_id, str):
        return None
    return Point(ts, track, flow_id)


def _is_time(value: Json) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= MAX_TIME
