"""Arrivals and lengths from a file: JSON lines, CSV with a header, or a router's log in JSON.

Each line needs three fields. Capitals, spaces, `-` and `_` in names do not matter.

- Arrival: `arrived_s`, `time_s`, `arrived_ms`, `time_ms`, or `timestamp`. A timestamp beside `input_length` is in
  milliseconds, as in Mooncake's public traces. Others are dates with times, as in Azure's traces, or seconds.
- Prompt tokens: `input_length`, `input_len`, `input_tokens`, `prompt_tokens`, `context_tokens`, `request_tokens`.
- Output tokens: `output_length`, `output_len`, `output_tokens`, `generated_tokens`, `response_tokens`.

A line may also give the number of cached prompt tokens: `cached_tokens`.

Lines of a router's log at the end of a request have all fields (stderr, with `--log-format json`). The request arrived
`e2e_ms` before `time`. Other lines of a log, and requests without an output, are skipped. Other fields, such as the
blocks of Mooncake's traces, are ignored.
"""

import csv
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import IO

from common.base.errors import ConfigError
from common.base.json_file import Json
from deploy.planning.simulation.loads import Arrival

MAX_LINE_BYTES = 1 << 20
MAX_BYTES = 1 << 30
"""Limit of a file."""
MAX_REQUESTS = 1_000_000
MAX_TOKENS = 1 << 24
"""Limit of a prompt or a reply."""
INPUTS = ("inputlength", "inputlen", "inputtokens", "prompttokens", "contexttokens", "requesttokens")
OUTPUTS = ("outputlength", "outputlen", "outputtokens", "generatedtokens", "responsetokens")
CACHED = ("cachedtokens", "cachedlength")
SECONDS, MILLISECONDS = ("arriveds", "times"), ("arrivedms", "timems")


class BadLine(Exception):
    """A line that is not a request, with the reason."""


def read_trace(path: Path) -> list[Arrival]:
    """Return all requests in order of arrival, the first at 0.

    Raises ConfigError with the line number for a bad line, or for too many requests or bytes.
    """
    arrivals = []
    try:
        with path.open("rb") as file:
            for number, fields in _numbered(_lines(file, path), path):
                try:
                    arrival = _arrival(fields)
                except BadLine as error:
                    raise ConfigError(f"{path}, line {number}: {error}") from None
                arrivals += [arrival] if arrival else []
                if len(arrivals) > MAX_REQUESTS:
                    raise ConfigError(f"{path}, line {number}: more than {MAX_REQUESTS:,} requests; give a part of it")
    except OSError as error:
        raise ConfigError(f"{path}: {error}") from None
    if not arrivals:
        raise ConfigError(f"{path}: no request in it; `baton plan --help` says which lines are")
    arrivals.sort(key=lambda arrival: arrival.time_ms)
    first_ms = arrivals[0].time_ms
    return [replace(each, time_ms=each.time_ms - first_ms) for each in arrivals]


def busiest(arrivals: list[Arrival], count: int) -> list[Arrival]:
    """Return the `count` consecutive requests within the shortest time; all if there are no more."""
    if len(arrivals) <= count:
        return arrivals
    start = min(range(len(arrivals) - count + 1), key=lambda i: arrivals[i + count - 1].time_ms - arrivals[i].time_ms)
    first_ms = arrivals[start].time_ms
    return [replace(each, time_ms=each.time_ms - first_ms) for each in arrivals[start : start + count]]


def _lines(file: IO[bytes], path: Path) -> Iterator[tuple[int, str]]:
    """Yield nonempty lines with line numbers."""
    num_bytes, number = 0, 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        num_bytes += len(line)
        if len(line) > MAX_LINE_BYTES or num_bytes > MAX_BYTES:
            limit = MAX_LINE_BYTES if len(line) > MAX_LINE_BYTES else MAX_BYTES
            what = "a line" if limit == MAX_LINE_BYTES else "a trace"
            raise ConfigError(f"{path}, line {number}: more than {limit:,} bytes in {what}; give a part of it")
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path}, line {number}: {error}") from None
        if text:
            yield number, text


def _numbered(lines: Iterator[tuple[int, str]], path: Path) -> Iterator[tuple[int, Mapping[str, Json]]]:
    """Yield lines as fields: JSON if the first line is an object, else CSV with a header."""
    first = next(lines, None)
    if first is None:
        return
    if first[1].startswith("{"):
        for number, text in chain([first], lines):
            try:
                fields = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{path}, line {number}: no JSON: {error}") from None
            if not isinstance(fields, dict):
                raise ConfigError(f"{path}, line {number}: no JSON object, as other lines are")
            yield number, {_plain(name): value for name, value in fields.items()}
        return
    header = [_plain(name) for name in _row(first, path)]
    for number, text in lines:
        row = _row((number, text), path)
        if len(row) != len(header):
            raise ConfigError(f"{path}, line {number}: {len(row)} columns, the header has {len(header)}")
        yield number, dict(zip(header, row, strict=True))


def _row(line: tuple[int, str], path: Path) -> list[str]:
    try:
        return next(csv.reader([line[1]]))
    except csv.Error as error:
        raise ConfigError(f"{path}, line {line[0]}: no CSV: {error}") from None


def _plain(name: str) -> str:
    return "".join(each for each in name.lower() if each.isalnum())


def _arrival(fields: Mapping[str, Json]) -> Arrival | None:
    """Return the request of a line; None without an answered request."""
    if "message" in fields and "level" in fields and "e2ems" not in fields:
        return None
    num_inputs, num_outputs = _tokens(fields, INPUTS), _tokens(fields, OUTPUTS)
    time_ms = _time_ms(fields)
    num_cached = _tokens(fields, CACHED) if fields.keys() & set(CACHED) else 0
    if not num_inputs or not num_outputs:
        return None
    return Arrival(time_ms, num_inputs, num_outputs, min(num_cached, num_inputs - 1))


def _tokens(fields: Mapping[str, Json], names: Iterable[str]) -> int:
    for name in names:
        if name in fields:
            value = _number(fields[name], name)
            if value != int(value) or not 0 <= value <= MAX_TOKENS:
                raise BadLine(f"{name} = {fields[name]!r}: a number of tokens, 0 to {MAX_TOKENS}")
            return int(value)
    raise BadLine(f"none of {', '.join(names)} among {', '.join(fields) or 'no fields'}")


def _time_ms(fields: Mapping[str, Json]) -> float:
    if "e2ems" in fields and "time" in fields:
        return _moment_ms(fields["time"]) - _number(fields["e2ems"], "e2e_ms")
    for names, factor in ((SECONDS, 1e3), (MILLISECONDS, 1.0)):
        for name in names:
            if name in fields:
                return _number(fields[name], name) * factor
    if "timestamp" not in fields:
        raise BadLine(f"none of arrived_s, time_s, arrived_ms, time_ms, timestamp among {', '.join(fields)}")
    stamp = fields["timestamp"]
    try:
        float(stamp)
    except (TypeError, ValueError, OverflowError):
        return _moment_ms(stamp)
    return _number(stamp, "timestamp") * (1.0 if "inputlength" in fields else 1e3)


def _moment_ms(text: Json) -> float:
    """Parse a date and time to milliseconds; without a zone, UTC counts."""
    try:
        moment = datetime.fromisoformat(str(text))
    except ValueError:
        raise BadLine(f"{text!r}: no time; seconds, or a date and time such as 2026-01-31 12:00:00.5") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1e3


def _number(value: Json, name: str) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise BadLine(f"{name} = {value!r}: no number")
    return number
