"""The router's part of a trace: a lane for each request, with its phases, and a flow from queue to end."""

from pathlib import Path

from common.base.json_file import JsonObject
from common.base.trace_events import Lanes, Tracer
from common.base.trace_file import Process, TraceFile
from common.settings.config import TraceSection
from router.dispatch.journey import Arrival, End, Leg, Phase

LEAST_S = 1e-6
"""Shortest slice with a flow, because viewers find no slice without length."""


class RequestTrace:
    """Writer of completions' trace events."""

    def __init__(self, file: TraceFile) -> None:
        self._file = file
        self.tracer, self.lanes = Tracer(file.write), Lanes()

    def watch(self, request_id: str, arrival: Arrival) -> "Way":
        return Way(self, request_id, arrival)

    def close(self) -> None:
        self._file.close()


class Way:
    """The trace of a completion; each slice is written at its end, so a dying router loses only open slices."""

    def __init__(self, trace: RequestTrace, request_id: str, arrival: Arrival) -> None:
        self._tracer, self._lanes = trace.tracer, trace.lanes
        self._request_id, self._arrival = request_id, arrival
        self._lane, self._begin_s, self._leg_s = 0, 0.0, 0.0

    def left(self, leg: Leg, end_s: float) -> None:
        if not self._lane:
            self._begin(leg.begin_s)
        self._leg_s = leg.begin_s
        args: JsonObject = {"request": self._request_id, "attempt": leg.attempt}
        if leg.route is not None:
            args |= {"prefill": leg.route.prefill.id, "decode": leg.route.decode.id}
        self._tracer.slice(self._lane, leg.phase.value, leg.begin_s, end_s, args)
        if leg.phase is Phase.QUEUED:
            self._tracer.flow(self._lane, self._request_id, (leg.begin_s + end_s) / 2)

    def ended(self, end: End) -> None:
        last_s = max(end.last_token_s, self._leg_s) if end.last_token_s else end.now_s
        begin_s = min(last_s, end.now_s - LEAST_S)
        named = {"request": self._request_id}
        self._tracer.slice(self._lane, "finish", begin_s, end.now_s, named)
        self._tracer.flow(self._lane, self._request_id, (begin_s + end.now_s) / 2)
        self._tracer.slice(self._lane, "request", self._begin_s, end.now_s, named | dict(end.facts))
        self._lanes.let_go(self._lane, end.now_s)

    def _begin(self, queued_s: float) -> None:
        received_s, body_s, read_s = self._arrival
        self._begin_s = received_s or queued_s
        self._lane = self._lanes.take(self._begin_s)
        if received_s:
            named = {"request": self._request_id}
            self._tracer.slice(self._lane, "receive", received_s, body_s, named)
            self._tracer.slice(self._lane, "tokenize", body_s, read_s, named)


def make_request_trace(section: TraceSection, router_epoch: int) -> RequestTrace | None:
    """Return the configured trace, or None; raise ConfigError if the file cannot be written."""
    if not section.dir:
        return None
    return RequestTrace(TraceFile(Path(section.dir), Process("router", "router", router_epoch), section.max_bytes))
