"""The parts of a trace as one file in Chrome's Trace Event format, as Perfetto opens it.

The first point of a flow begins it and the last one ends it, whoever wrote them: so requests whose process died in the
middle have whole flows, too.
"""

import gzip
import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from common.errors import ConfigError
from common.trace_events import CATEGORY, DEVICE, FIRST_LANE, LOOP
from deploy.trace_parts import Part, Point, Recording

TRACKS_A_PROCESS = 100_000
"""Thread ids are unique over processes: viewers mix up those that are not."""
Event = dict[str, Any]


def write_trace(recording: Recording, path: Path) -> int:
    """Write all of it, compressed if the name ends with .gz; returns the number of events. Raises ConfigError."""
    try:
        with _opened(path) as file:
            num_events = 0
            file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
            for event in chrome_events(recording.parts):
                file.write(f"{',' if num_events else ''}{json.dumps(event, separators=(',', ':'))}\n")
                num_events += 1
            file.write("]}\n")
    except OSError as error:
        raise ConfigError(f"--out {path}: {error.strerror or error}; name a file to write to") from None
    return num_events


def _opened(path: Path) -> TextIO:
    if path.suffix == ".gz":
        return gzip.open(path, "wt", compresslevel=6, encoding="utf-8")
    return path.open("w", encoding="utf-8")


def chrome_events(parts: list[Part]) -> Iterator[Event]:
    """Names of processes and tracks, then events in order of time, a slice before those inside it and points in it."""
    names = process_names(parts)
    for number, part in enumerate(parts, 1):
        yield from _names(number, names[number - 1], part)
    steps = _flow_steps(parts)
    timed: list[tuple[float, int, float, Event]] = []
    for number, part in enumerate(parts, 1):
        for each in part.slices:
            event = _event("X", number, each.track, each.name, each.ts) | {"dur": round(each.dur, 3)}
            timed.append((each.ts, 0, -each.dur, event | ({"args": each.args} if each.args else {})))
        for point in part.points:
            if phase := steps.get((number, point)):
                event = _event(phase, number, point.track, CATEGORY, point.ts)
                event |= {"cat": CATEGORY, "id": point.flow_id, "bp": "e"}
                timed.append((point.ts, 1, 0.0, event))
    timed.sort(key=lambda each: each[:3])
    for *_, event in timed:
        yield event


def process_names(parts: list[Part]) -> list[str]:
    """Its id, and which start of it that is if there are several."""
    starts, seen = Counter((part.role, part.id) for part in parts), Counter[tuple[str, str]]()
    names = []
    for part in parts:
        seen[part.role, part.id] += 1
        several = starts[part.role, part.id] > 1
        names.append(f"{part.id}, start {seen[part.role, part.id]}" if several else part.id)
    return names


def _flow_steps(parts: list[Part]) -> dict[tuple[int, Point], str]:
    """What each point is of its flow: its start, a step, or its end; a flow of one point is none."""
    flows: dict[str, list[tuple[float, int, Point]]] = defaultdict(list)
    for number, part in enumerate(parts, 1):
        for point in part.points:
            flows[point.flow_id].append((point.ts, number, point))
    steps = {}
    for points in flows.values():
        if len(points) > 1:
            points.sort()
            for index, (_, number, point) in enumerate(points):
                steps[number, point] = "s" if index == 0 else "f" if index == len(points) - 1 else "t"
    return steps


def _names(number: int, name: str, part: Part) -> Iterator[Event]:
    """What viewers call a process and its tracks, and in which order they show them."""
    yield _named(number, 0, "process_name", {"name": name})
    yield _named(number, 0, "process_labels", {"labels": f"{part.role}, process {part.pid} on {part.host}"})
    yield _named(number, 0, "process_sort_index", {"sort_index": number})
    for track in sorted({each.track for each in part.slices}):
        yield _named(number, track, "thread_name", {"name": _track_name(part.role, track)})
        yield _named(number, track, "thread_sort_index", {"sort_index": track})


def _track_name(role: str, track: int) -> str:
    if track >= FIRST_LANE:
        return f"{'requests' if role == 'router' else 'handoffs'} {track - FIRST_LANE + 1}"
    return {LOOP: "loop", DEVICE: "device"}.get(track, f"track {track}")


def _named(number: int, track: int, name: str, args: Event) -> Event:
    return {"ph": "M", "pid": number, "tid": number * TRACKS_A_PROCESS + track, "name": name, "args": args}


def _event(phase: str, number: int, track: int, name: str, ts: float) -> Event:
    return {"ph": phase, "pid": number, "tid": number * TRACKS_A_PROCESS + track, "name": name, "ts": round(ts, 3)}
