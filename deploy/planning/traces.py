"""Arrivals and lengths from a file of JSON lines: a router's log, or a trace in the form of Mooncake's public traces.

- A router's log (stderr, with `--log-format json`) has a line for the end of each request. The request arrived `e2e_ms`
  before `time`. Other lines, and requests without an output, are skipped.
- A trace has `timestamp` in milliseconds, `input_length` and `output_length` on each line. Other fields are ignored.
"""

import json
import math
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from common.base.errors import ConfigError
from common.base.json_file import Json
from deploy.planning.simulation.loads import Arrival

MAX_REQUESTS = 1_000_000
MAX_TOKENS = 1 << 24
"""Limit of a prompt or a reply."""


def read_trace(path: Path) -> list[Arrival]:
    """Return all requests in order of arrival, the first at 0.

    Raises ConfigError with the line number for a bad line, or for too many requests.
    """
    arrivals: list[Arrival] = []
    number = 0
    try:
        with path.open(encoding="utf-8") as file:
            for line in file:
                number += 1
                if line.strip() and (arrival := _arrival(json.loads(line))) is not None:
                    arrivals.append(arrival)
                if len(arrivals) > MAX_REQUESTS:
                    raise ValueError(f"more than {MAX_REQUESTS:,} requests; give a part of it")
    except OSError as error:
        raise ConfigError(f"{path}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path}, line {number}: {error}; `baton plan --help` says which lines are requests"
        ) from None
    if not arrivals:
        raise ConfigError(f"{path}: no request in it; `baton plan --help` says which lines are")
    return _from_zero(sorted(arrivals, key=lambda arrival: arrival.time_ms))


def busiest(arrivals: list[Arrival], count: int) -> list[Arrival]:
    """Return the `count` consecutive requests within the shortest time; all if there are no more."""
    if len(arrivals) <= count:
        return arrivals
    start = min(range(len(arrivals) - count + 1), key=lambda i: arrivals[i + count - 1].time_ms - arrivals[i].time_ms)
    return _from_zero(arrivals[start : start + count])


def _from_zero(arrivals: list[Arrival]) -> list[Arrival]:
    first_ms = arrivals[0].time_ms
    return [replace(each, time_ms=each.time_ms - first_ms) for each in arrivals]


def _arrival(fields: Json) -> Arrival | None:
    """Return the request of a line, None without an answered request; raises ValueError."""
    if not isinstance(fields, dict):
        raise ValueError("no JSON object")
    if "input_length" in fields:
        names, time_ms, num_cached = ("input_length", "output_length"), _number(fields, "timestamp"), 0
    elif "e2e_ms" in fields:
        ended_s = datetime.fromisoformat(str(fields.get("time"))).timestamp()
        names, time_ms = ("prompt_tokens", "output_tokens"), ended_s * 1e3 - _number(fields, "e2e_ms")
        num_cached = _tokens(fields, "cached_tokens")
    elif "message" in fields:
        return None
    else:
        raise ValueError(f"neither input_length nor e2e_ms among {', '.join(fields)}")
    num_inputs, num_outputs = (_tokens(fields, name) for name in names)
    if not num_inputs or not num_outputs:
        return None
    return Arrival(time_ms, num_inputs, num_outputs, min(num_cached, num_inputs - 1))


def _tokens(fields: dict[str, Json], name: str) -> int:
    value = _number(fields, name)
    if value != int(value) or not 0 <= value <= MAX_TOKENS:
        raise ValueError(f"{name} = {fields[name]!r}: a number of tokens, 0 to {MAX_TOKENS}")
    return int(value)


def _number(fields: dict[str, Json], name: str) -> float:
    value = fields.get(name)
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name} = {value!r}: no number")
    return value
