"""Traces: which lines are requests, and which are refused by their number."""

import json
import random
from pathlib import Path

import pytest

from common.base.errors import ConfigError
from deploy.planning import traces
from deploy.planning.simulation.loads import Arrival
from deploy.planning.traces import busiest, read_trace


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "trace"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_trace_is_in_mooncake_s_form(tmp_path: Path) -> None:
    lines = (
        '{"timestamp": 3500, "input_length": 40, "output_length": 6}\n\n'
        '{"timestamp": 1000, "input_length": 30, "output_length": 5, "hash_ids": [1]}\n'
    )
    assert read_trace(written(tmp_path, lines)) == [Arrival(0.0, 30, 5), Arrival(2500.0, 40, 6)]


def test_a_router_s_log_is_a_trace(tmp_path: Path) -> None:
    """Requests by when they arrived, whatever else is in the log, and those that failed left out."""
    said: dict[str, object] = {"level": "INFO", "process": "router", "message": "..."}
    ended = said | {"cached_tokens": 2}
    lines: list[dict[str, object]] = [
        said | {"time": "2026-11-23T10:00:00.000Z"},
        ended | {"time": "2026-11-23T10:00:09.000Z", "prompt_tokens": 7, "output_tokens": 3, "e2e_ms": 8e3},
        ended | {"time": "2026-11-23T10:00:02.500Z", "prompt_tokens": 9, "output_tokens": 1, "e2e_ms": 1e3},
        ended | {"time": "2026-11-23T10:00:03.000Z", "prompt_tokens": 9, "output_tokens": 0, "e2e_ms": 1e3},
    ]
    read = read_trace(written(tmp_path, "\n".join(map(json.dumps, lines))))
    assert read == [Arrival(0.0, 7, 3, 2), Arrival(500.0, 9, 1, 2)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no request in it"),
        ("a,b\n1,2\n", r"line 1: Expecting value.*`baton plan --help` says"),
        (
            '{"timestamp": 1, "output_length": 2}',
            "line 1: neither input_length nor e2e_ms among timestamp",
        ),
        ('{"timestamp": 1, "input_length": 1, "output_length": 2}\n[1]', "line 2: no JSON object"),
        ('{"timestamp": 1, "input_length": 1, "output_length": "x"}', "line 1: output_length = 'x': no number"),
        ('{"timestamp": NaN, "input_length": 1, "output_length": 2}', "line 1: timestamp = nan: no number"),
        ('{"input_length": 1, "output_length": 2}', "line 1: timestamp = None: no number"),
        (
            '{"timestamp": 1, "input_length": 2.5, "output_length": 2}',
            r"line 1: input_length = 2\.5: a number of tokens",
        ),
        ('{"timestamp": 1, "input_length": -1, "output_length": 2}', "line 1: input_length = -1: a number of tokens"),
        ('{"time": "yesterday", "e2e_ms": 1, "message": ""}', "line 1: Invalid isoformat string: 'yesterday'"),
        ('{"timestamp": ' + "[" * 100_000, "line 1: "),
    ],
)
def test_what_is_no_request_is_named_by_its_line(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        read_trace(written(tmp_path, text))


def test_no_file_and_no_text_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_trace(tmp_path / "nothing")
    path = tmp_path / "bytes"
    path.write_bytes(b"\xff\n")
    with pytest.raises(ConfigError, match="can't decode"):
        read_trace(path)


def test_too_many_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = '{"timestamp": 1, "input_length": 1, "output_length": 2}\n'
    monkeypatch.setattr(traces, "MAX_REQUESTS", 3)
    with pytest.raises(ConfigError, match="line 4: more than 3 requests"):
        read_trace(written(tmp_path, line * 4))


def test_the_busiest_part_is_the_shortest() -> None:
    rng = random.Random(1)
    arrivals = sorted((Arrival(rng.random() ** 3 * 1e4, n, 1) for n in range(60)), key=lambda each: each.time_ms)
    part = busiest(arrivals, 10)
    assert len(part) == 10 and part[0].time_ms == 0
    spans = [arrivals[i + 9].time_ms - arrivals[i].time_ms for i in range(51)]
    assert part[-1].time_ms == min(spans)
    assert busiest(arrivals, 60) == arrivals
