"""Way of a request through the processes, from a trace."""

from collections.abc import Iterator
from typing import NamedTuple

from common.base.errors import ConfigError
from common.base.json_file import JsonObject
from common.base.trace_events import DEVICE, LOOP
from deploy.operate.tables import aligned, wrapped
from deploy.trace.merge import process_names
from deploy.trace.parts import Part, Recording, Slice
from deploy.trace.summary import requests

HIDDEN = ("request", "requests", "request_id")
"""Arguments of a slice that repeat the request."""
MAX_TOLD = 8
"""Most completions shown at once."""


class _Stop(NamedTuple):
    """A slice on the way."""

    at: Slice
    process: str
    times: int = 1  # number of consecutive slices


def request_ways(recording: Recording, wanted: str) -> str:
    """Return the ways of completions by completion id, by response id, or by a client's request id.

    Raises ConfigError if nothing was traced.
    """
    ids = _completions(recording.parts, wanted)
    if not ids:
        known = [str(args["request"]) for args in requests(recording.parts)][-3:]
        shown = f"; there is {', '.join(known)}, for example" if known else ""
        raise ConfigError(f"--request {wanted}: nothing was traced of it{shown}")
    ways = [_way(recording.parts, request_id) for request_id in ids[:MAX_TOLD]]
    more = [f"and {len(ids) - MAX_TOLD} more of {wanted}"] if len(ids) > MAX_TOLD else []
    return "\n\n".join(ways + more)


def _completions(parts: list[Part], wanted: str) -> list[str]:
    found: dict[str, None] = {}
    for part in parts:
        for each in part.slices:
            is_called_so = each.args.get("client_request_id") == wanted
            for request_id in _whose(each.args):
                if is_called_so or request_id == wanted or request_id.rpartition("-")[0] == wanted:
                    found[request_id] = None
    return list(found)


def _whose(args: JsonObject) -> list[str]:
    """Return the completions of a slice."""
    several = args.get("requests")
    listed = [str(each).rpartition("#")[0] for each in several] if isinstance(several, list) else []
    return [*listed, *([str(args["request"])] if "request" in args else [])]


def _way(parts: list[Part], request_id: str) -> str:
    names = process_names(parts)
    stops = [
        _Stop(each, name)
        for name, part in zip(names, parts, strict=True)
        for each in part.slices
        if request_id in _whose(each.args)
    ]
    stops += [stop for name, part in zip(names, parts, strict=True) for stop in _decode_steps(name, part, request_id)]
    stops.sort(key=lambda stop: (stop.at.ts, -stop.at.dur))
    begin = stops[0].at.ts
    rows, facts = [("AT", "TOOK", "WHERE", "WHAT", "")], ""
    for stop in stops:
        times = f"{stop.times} steps" if stop.times > 1 else stop.at.name
        told = _told(stop.at.args)
        if stop.at.name == "request":  # the whole request: too much for a row
            facts, told = told, ""
        rows.append((_ms(stop.at.ts - begin), _ms(stop.at.dur), stop.process, times, told))
    return "\n".join([request_id, *wrapped(facts, indent="  "), *aligned(rows)])


def _decode_steps(name: str, part: Part, request_id: str) -> Iterator[_Stop]:
    """Yield decode steps between the first step and the loop's last phase with the request's name."""
    if part.role != "decode":
        return
    steps = part.on(DEVICE, "step") or [each for each in part.on(LOOP, "launch") if each.args]
    first = next((each for each in steps if request_id in _whose(each.args)), None)
    met = [each.ts for each in part.slices if each.track == LOOP and request_id in _whose(each.args)]
    if first is None or not met:
        return
    between = [each for each in steps if first.end <= each.ts and each.end <= met[-1]]
    if between:
        whole = Slice(between[0].ts, between[-1].end - between[0].ts, first.track, "steps", {})
        yield _Stop(whole, name, len(between))


def _told(args: JsonObject) -> str:
    return " ".join(f"{key}={value}" for key, value in args.items() if key not in HIDDEN and value not in (None, ""))


def _ms(us: float) -> str:
    return f"{us / 1e3:.3f} ms"
