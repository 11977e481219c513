"""Merge of a trace's parts into a file in Chrome's Trace Event format, for Perfetto.

The first point of a flow is its begin and the last point its end, whatever process wrote the points. So requests of a
dead process have whole flows, too.
"""

import gzip
import heapq
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import TextIO

from common.base.errors import ConfigError
from common.base.json_file import JsonObject
from common.base.trace_events import CATEGORY, DEVICE, FIRST_LANE, LOOP
from deploy.trace.parts import Part, Point, Recording, Slice

TRACKS_A_PROCESS = 100_000
"""Stride of thread ids, unique over processes, because viewers mix up equal ids."""
ROUNDED_NS = 4
LANES = {"router": "requests", "prefill": "prompts", "decode": "handoffs"}
"""Contents of lanes, by role."""
Event = JsonObject
Timed = tuple[int, str]
Steps = dict[tuple[int, Point], str]
"""Phase of each point in its flow, by process."""


def write_trace(recording: Recording, path: Path) -> int:
    """Write the trace, compressed if the name ends with .gz; return the number of events. Raises ConfigError."""
    try:
        with _opened(path) as file:
            num_events = 0
            file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
            for event in chrome_events(recording):
                file.write(f"{',' if num_events else ''}{event}\n")
                num_events += 1
            file.write("]}\n")
    except OSError as error:
        raise ConfigError(f"--out {path}: {error.strerror or error}; name a file to write to") from None
    return num_events


def _opened(path: Path) -> TextIO:
    if path.suffix == ".gz":
        return gzip.open(path, "wt", compresslevel=1, encoding="utf-8")
    return path.open("w", encoding="utf-8")


def chrome_events(recording: Recording) -> Iterator[str]:
    """Yield events as JSON: names of processes and tracks, then slices and points by time.

    A slice comes before slices and points inside. Times begin with the first event.
    """
    parts, begin = recording.parts, recording.begin
    names, steps = process_names(parts), _flow_steps(parts)
    for number, part in enumerate(parts, 1):
        for named in _names(number, names[number - 1], part):
            yield json.dumps(named)
    streams = [stream for number, part in enumerate(parts, 1) for stream in _streams(number, part, begin, steps)]
    for _, event in heapq.merge(*streams, key=itemgetter(0)):
        yield event


def _streams(number: int, part: Part, begin: float, steps: Steps) -> tuple[Iterator[Timed], Iterator[Timed]]:
    """Return streams of slices and points, in order of time."""
    slices = ((ns, _slice_json(each, number, ns, dur_ns)) for each, ns, dur_ns in nested(part.slices, begin))
    points = (
        (ns := round((each.ts - begin) * 1e3), _point_json(each, number, ns, steps))
        for each in part.points
        if (number, each) in steps
    )
    return slices, points


def nested(slices: Sequence[Slice], begin: float) -> Iterator[tuple[Slice, int, int]]:
    """Yield each slice with time since `begin` and length in nanoseconds; on a track slices nest or do not touch.

    Viewers drop a slice with its begin inside another and its end later, even by a nanosecond. Rounding of times causes
    such errors on a machine running for months.
    """
    open_ends: dict[int, list[int]] = defaultdict(list)
    for each in slices:
        ns, end_ns, ends = round((each.ts - begin) * 1e3), round((each.end - begin) * 1e3), open_ends[each.track]
        while ends and ends[-1] < end_ns:
            if ends[-1] > ns + ROUNDED_NS:
                end_ns = ends[-1]
            else:
                ns = max(ns, ends.pop())
        end_ns = max(ns, end_ns)
        ends.append(end_ns)
        yield each, ns, end_ns - ns


def _slice_json(each: Slice, number: int, ns: int, dur_ns: int) -> str:
    args = f',"args":{json.dumps(each.args)}' if each.args else ""
    where = _where("X", number, each.track, ns)
    return f'{{{where},"dur":{dur_ns / 1e3:.3f},"name":{json.dumps(each.name)}{args}}}'


def _point_json(each: Point, number: int, ns: int, steps: Steps) -> str:
    where = _where(steps[number, each], number, each.track, ns)
    return f'{{{where},"cat":"{CATEGORY}","name":"{CATEGORY}","id":{json.dumps(each.flow_id)},"bp":"e"}}'


def _where(phase: str, number: int, track: int, ns: int) -> str:
    return f'"ph":"{phase}","pid":{number},"tid":{number * TRACKS_A_PROCESS + track},"ts":{ns / 1e3:.3f}'


def process_names(parts: list[Part]) -> list[str]:
    """Return the names of processes: the id, with the number of the start if there are several."""
    starts, seen = Counter((part.role, part.id) for part in parts), Counter[tuple[str, str]]()
    names = []
    for part in parts:
        seen[part.role, part.id] += 1
        several = starts[part.role, part.id] > 1
        names.append(f"{part.id}, start {seen[part.role, part.id]}" if several else part.id)
    return names


def _flow_steps(parts: list[Part]) -> Steps:
    """Return the phase of each point in its flow: start, step or end; a flow of a single point is dropped."""
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
    """Yield names and order of a process and its tracks for viewers."""
    yield _named(number, 0, "process_name", {"name": name})
    yield _named(number, 0, "process_labels", {"labels": f"{part.role}, process {part.pid} on {part.host}"})
    yield _named(number, 0, "process_sort_index", {"sort_index": number})
    for track in sorted({each.track for each in part.slices}):
        yield _named(number, track, "thread_name", {"name": _track_name(part.role, track)})
        yield _named(number, track, "thread_sort_index", {"sort_index": track})


def _track_name(role: str, track: int) -> str:
    if track >= FIRST_LANE:
        return f"{LANES.get(role, 'lane')} {track - FIRST_LANE + 1}"
    return {LOOP: "loop", DEVICE: "device"}.get(track, f"track {track}")


def _named(number: int, track: int, name: str, args: Event) -> Event:
    return {"ph": "M", "pid": number, "tid": number * TRACKS_A_PROCESS + track, "name": name, "args": args}
