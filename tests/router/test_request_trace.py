"""Whatever becomes of requests, their slices nest and their lanes do not overlap."""

import json
import random
from collections import defaultdict
from typing import Any, cast

import pytest

from common.base.trace_events import flow_id
from common.base.trace_file import TraceFile
from router.dispatch.journey import Arrival, End, Journey, Phase
from router.observe.request_trace import RequestTrace
from tests.traces import assert_nested

Event = dict[str, Any]


class Lines:
    """A file that is a list."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.write = self.lines.append


@pytest.mark.parametrize("seed", range(20))
def test_slices_nest_through_replays_aborts_and_failures(seed: int) -> None:
    rng, lines, now_s = random.Random(seed), Lines(), 100.0
    trace = RequestTrace(cast(TraceFile, lines))
    under_way: list[tuple[str, Journey, float]] = []
    told: dict[str, list[tuple[Phase, float]]] = defaultdict(list)
    for number in range(60):
        now_s += rng.random()
        if rng.random() < 0.5:
            request_id = f"cmpl-{number}-0"
            arrival = Arrival(now_s - 0.5, now_s - 0.3, now_s - 0.2) if rng.random() < 0.8 else Arrival()
            under_way.append((request_id, Journey([trace.watch(request_id, arrival)]), 0.0))
            under_way[-1][1].enter(Phase.QUEUED, now_s, 0, None)
            told[request_id].append((Phase.QUEUED, now_s))
        elif under_way:
            request_id, journey, last_token_s = under_way.pop(rng.randrange(len(under_way)))
            if rng.random() < 0.4:
                journey.end(End(now_s, last_token_s, {"state": "aborted"}))
                continue
            last_token_s = now_s - 0.01 if rng.random() < 0.5 else last_token_s
            phase = rng.choice(list(Phase))
            journey.enter(phase, now_s, 0, None)
            told[request_id].append((phase, now_s))
            under_way.append((request_id, journey, last_token_s))
    for _, journey, last_token_s in under_way:
        now_s += rng.random()
        journey.end(End(now_s, last_token_s, {"state": "finished"}))
    events: list[Event] = [json.loads(line) for line in lines.lines]
    lanes: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            lanes[event["tid"]].append(event)
    for slices in lanes.values():
        assert_nested(sorted(slices, key=lambda e: (e["ts"], -e["dur"])))
    for request_id, phases in told.items():
        mine = [e for e in events if e["ph"] == "X" and e["args"]["request"] == request_id]
        assert [e["name"] for e in mine if "attempt" in e["args"]] == [phase.value for phase, _ in phases]
        assert len({e["tid"] for e in mine}) == 1
        points = [e for e in events if e["ph"] == "t" and e["id"] == flow_id(request_id)]
        assert len(points) == 1 + sum(phase is Phase.QUEUED for phase, _ in phases)
