"""What holds for every merged trace, as a viewer reads it."""

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

Event = dict[str, Any]


def read_events(path: Path) -> list[Event]:
    """All events of a Chrome trace, each checked to be one; slices of a track are by time and nest."""
    data = path.read_bytes()
    events: list[Event] = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)["traceEvents"]
    named = {(e["pid"], e["tid"]) for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    tracks: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in (e for e in events if e["ph"] != "M"):
        assert event["ph"] == "X"
        assert event["ts"] >= 0
        assert (event["pid"], event["tid"]) in named
        tracks[event["pid"], event["tid"]].append(event)
    for track in tracks.values():
        assert_nested(track)
    return events


def assert_nested(slices: list[Event]) -> None:
    """Each begins no earlier than the one before it and lies inside every one that it begins in, to the nanosecond."""
    open_ends: list[int] = []
    for each in slices:
        begin, dur = round(each["ts"] * 1e3), round(each["dur"] * 1e3)
        assert dur >= 0
        while open_ends and open_ends[-1] <= begin:
            open_ends.pop()
        assert not open_ends or begin + dur <= open_ends[-1]
        open_ends.append(begin + dur)


def slices_of(events: list[Event], request_id: str) -> list[Event]:
    """Those that name the completion."""
    named = (e for e in events if e["ph"] == "X" and "requests" in e["args"])
    return [e for e in named if any(key.startswith(f"{request_id}#") for key in e["args"]["requests"])]


def names_of(events: list[Event]) -> dict[int, str]:
    """Of processes, by pid."""
    return {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
