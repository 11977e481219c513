"""What holds for every Chrome trace that a worker writes."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

Spans = list[dict[str, Any]]


def read_trace(path: Path) -> tuple[Spans, Spans]:
    """Spans of the host's track and of the device's, each checked to be in order and to nest."""
    events = json.loads(path.read_text())["traceEvents"]
    assert [event["args"]["name"] for event in events if event["ph"] == "M"] == ["host", "device"]
    host, device = ([e for e in events if e["ph"] == "X" and e["tid"] == track] for track in (0, 1))
    for spans in (host, device):
        assert_nested(spans)
    return host, device


def assert_nested(spans: Spans) -> None:
    """Each span begins no earlier than the one before it and lies inside every one that it begins in."""
    assert all(before["ts"] <= after["ts"] for before, after in pairwise(spans))
    open_ends: list[float] = []
    for span in spans:
        while open_ends and open_ends[-1] <= span["ts"] + 2e-3:  # times are rounded to a nanosecond
            open_ends.pop()
        end = span["ts"] + span["dur"]
        assert not open_ends or end <= open_ends[-1] + 2e-3
        open_ends.append(end)
