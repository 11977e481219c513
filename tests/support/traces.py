"""What holds for every merged trace, as a viewer reads it."""

import gzip
import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

Event = dict[str, Any]
ROUNDED_US = 2e-3
"""Times are rounded to a nanosecond."""


def read_events(path: Path) -> list[Event]:
    """All events of a Chrome trace, each checked to be one, in order of time; slices nest and flows are bound."""
    data = path.read_bytes()
    events: list[Event] = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)["traceEvents"]
    named = {(e["pid"], e["tid"]) for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    timed = [e for e in events if e["ph"] != "M"]
    assert {e["ph"] for e in timed} <= {"X", "s", "t", "f"}
    assert all(before["ts"] <= after["ts"] for before, after in pairwise(timed))
    tracks: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in timed:
        assert event["ts"] >= 0
        assert (event["pid"], event["tid"]) in named
        tracks[event["pid"], event["tid"]].append(event)
    for track in tracks.values():
        assert_nested([event for event in track if event["ph"] == "X"])
    assert_flows(timed, tracks)
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


def assert_flows(timed: list[Event], tracks: dict[tuple[int, int], list[Event]]) -> None:
    """Each begins once, first, and ends once, last; every point of it lies in a slice of its track."""
    phases: dict[str, str] = defaultdict(str)
    for event in timed:
        if event["ph"] == "X":
            continue
        phases[event["id"]] += event["ph"]
        assert 0 <= int(event["id"], 16) < 1 << 64, "viewers read it so"
        slices = [e for e in tracks[event["pid"], event["tid"]] if e["ph"] == "X"]
        assert any(s["ts"] - ROUNDED_US <= event["ts"] <= s["ts"] + s["dur"] + ROUNDED_US for s in slices)
    for told in phases.values():
        assert (told[0], told[-1]) == ("s", "f")
        assert set(told[1:-1]) <= {"t"}


def slices_of(events: list[Event], request_id: str) -> list[Event]:
    """Those that name the completion."""
    return [e for e in events if e["ph"] == "X" and is_of(e, request_id)]


def is_of(event: Event, request_id: str) -> bool:
    args = event.get("args", {})
    return args.get("request") == request_id or any(k.startswith(f"{request_id}#") for k in args.get("requests", ()))


def flow_of(events: list[Event], flow_id: str) -> list[Event]:
    """For each point of a flow the innermost slice that it lies in."""
    found = []
    for point in (e for e in events if e["ph"] in "stf" and e["id"] == flow_id):
        around = [
            e
            for e in events
            if e["ph"] == "X" and e["tid"] == point["tid"] and e["ts"] <= point["ts"] <= e["ts"] + e["dur"]
        ]
        found.append(min(around, key=lambda e: float(e["dur"])))
    return found


def names_of(events: list[Event]) -> dict[int, str]:
    """Of processes, by pid."""
    return {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
