"""Merge of a trace's parts into a file in Chrome's Trace Event format, for Perfetto."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from common.base.errors import ConfigError
from common.base.json_file import JsonObject
from common.base.trace_events import DEVICE, LOOP
from deploy.trace.parts import Part

TRACKS_A_PROCESS = 10
"""Stride of thread ids, unique over processes, because viewers mix up equal ids."""
TRACKS = {LOOP: "loop", DEVICE: "device"}


def write_trace(parts: list[Part], path: Path) -> int:
    """Write the trace, compressed if the name ends with .gz; return the number of events. Raises ConfigError."""
    num_events = 0
    try:
        with _opened(path) as file:
            file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
            for event in chrome_events(parts):
                file.write(f"{',' if num_events else ''}{json.dumps(event)}\n")
                num_events += 1
            file.write("]}\n")
    except OSError as error:
        raise ConfigError(f"--out {path}: {error.strerror or error}; name a file to write to") from None
    return num_events


def _opened(path: Path) -> TextIO:
    if path.suffix == ".gz":
        return gzip.open(path, "wt", compresslevel=1, encoding="utf-8")
    return path.open("w", encoding="utf-8")


def chrome_events(parts: list[Part]) -> Iterator[JsonObject]:
    """Yield the names of processes and tracks, then slices, in microseconds since the first slice."""
    begin_ns = min(part.slices[0].begin_ns for part in parts)
    for number, part in enumerate(parts, 1):
        yield from _names(number, part)
        for each in part.slices:
            times = {"ts": (each.begin_ns - begin_ns) / 1e3, "dur": each.dur_ns / 1e3}
            yield {"ph": "X", "name": each.name, **_where(number, each.track), **times, "args": each.args or {}}


def _names(number: int, part: Part) -> Iterator[JsonObject]:
    """Yield names and order of a process and its tracks for viewers."""
    labels = f"{part.role}, process {part.pid} on {part.host}"
    yield _named(number, 0, "process_name", {"name": part.name})
    yield _named(number, 0, "process_labels", {"labels": labels})
    yield _named(number, 0, "process_sort_index", {"sort_index": number})
    for track in sorted({each.track for each in part.slices}):
        yield _named(number, track, "thread_name", {"name": TRACKS.get(track, f"track {track}")})
        yield _named(number, track, "thread_sort_index", {"sort_index": track})


def _named(number: int, track: int, name: str, args: JsonObject) -> JsonObject:
    return {"ph": "M", "name": name, **_where(number, track), "args": args}


def _where(number: int, track: int) -> JsonObject:
    return {"pid": number, "tid": number * TRACKS_A_PROCESS + track}
