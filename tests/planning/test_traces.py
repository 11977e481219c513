"""Traces: which lines are requests, and which are refused by their number."""

import json
import random
from pathlib import Path

import pytest

from common.base.errors import ConfigError
from deploy.planning import traces
from deploy.planning.simulation.loads import Arrival
from deploy.planning.traces import busiest, read_trace

FORMS = {
    "mooncake": '{"timestamp": 1000, "input_length": 30, "output_length": 5, "hash_ids": [1]}\n'
    '{"timestamp": 3500, "input_length": 40, "output_length": 6}\n',
    "azure": "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:15:46.6805900,30,5\n2023-11-16 18:15:49.1805900,40,6\n",
    "burst": "Timestamp,Model,Request tokens,Response tokens\n5,x,30,5\n7.5,y,40,6\n",
    "plain": '{"arrived_s": 2.5, "prompt_tokens": 40, "output_tokens": 6}\n\n'
    '{"arrived_s": 0, "input_len": 30, "output_len": 5}\n',
    "excel": "\ufefftime_ms;input_tokens;output_tokens\n".replace(";", ",") + "0,30,5\r\n2500,40,6\r\n",
}


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "trace"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("form", FORMS)
def test_known_forms_say_the_same(form: str, tmp_path: Path) -> None:
    read = read_trace(written(tmp_path, FORMS[form]))
    assert [(round(each.time_ms), each.num_inputs, each.num_outputs) for each in read] == [(0, 30, 5), (2500, 40, 6)]


def test_a_router_s_log_is_a_trace(tmp_path: Path) -> None:
    """Requests by when they arrived, whatever else is in the log, and those that failed left out."""
    said: dict[str, object] = {"level": "INFO", "process": "router", "message": "..."}
    lines: list[dict[str, object]] = [
        said | {"time": "2026-11-23T10:00:00.000Z"},
        said | {"time": "2026-11-23T10:00:09.000Z", "prompt_tokens": 7, "output_tokens": 3, "e2e_ms": 8000.0},
        said | {"time": "2026-11-23T10:00:02.500Z", "prompt_tokens": 9, "output_tokens": 1, "e2e_ms": 1000.0},
        said | {"time": "2026-11-23T10:00:03.000Z", "prompt_tokens": 9, "output_tokens": 0, "e2e_ms": 1000.0},
    ]
    read = read_trace(written(tmp_path, "\n".join(map(json.dumps, lines))))
    assert read == [Arrival(0.0, 7, 3), Arrival(500.0, 9, 1)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no request in it"),
        ("a,b\n1,2\n", r"line 2: none of inputlength.* among a, b"),
        ("time_s,input_len,output_len\n1,2\n", "line 2: 2 columns, the header has 3"),
        ("time_s,input_len,output_len\n1,2,x\n", "line 2: outputlen = 'x': no number"),
        ("time_s,input_len,output_len\n1,2,3\nnan,2,3\n", "line 3: times = 'nan': no number"),
        ("time_s,input_len,output_len\n1,2.5,3\n", r"line 2: inputlen = '2\.5': a number of tokens"),
        ("time_s,input_len,output_len\n1,-1,3\n", "line 2: inputlen = '-1': a number of tokens"),
        ("input_len,output_len\n1,3\n", "line 2: none of arrived_s"),
        ("timestamp,input_len,output_len\nyesterday,1,3\n", "line 2: 'yesterday': no time"),
        ('{"time_s": 1, "input_len": 1, "output_len": 2}\n{', "line 2: no JSON"),
        ('{"time_s": 1, "input_len": 1, "output_len": 2}\n[1]', "line 2: no JSON object"),
        ('{"time_s": true, "input_len": 1, "output_len": 2}', "line 1: times = True: no number"),
        ('{"time_s": 1e999, "input_len": 1, "output_len": 2}', "line 1: times = inf: no number"),
        ('{"time_s": 1, "input_len": 1' + "0" * 400 + ', "output_len": 2}', "line 1: inputlen = 10.*no number"),
        ('{"time_s": ' + "[" * 100_000, "line 1: no JSON"),
        ("\x00time_s,input_len,output_len\n", "no request in it"),
    ],
)
def test_what_is_no_request_is_named_by_its_line(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        read_trace(written(tmp_path, text))


def test_no_file_and_no_text_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_trace(tmp_path / "nothing")
    path = tmp_path / "bytes"
    path.write_bytes(b"time_s,input_len,output_len\n1,1,1\n\xff\n")
    with pytest.raises(ConfigError, match=r"line 3: .*can't decode"):
        read_trace(path)


def test_too_much_is_refused_before_it_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = '{"time_s": 1, "input_len": 1, "output_len": 2}\n'
    monkeypatch.setattr(traces, "MAX_REQUESTS", 3)
    with pytest.raises(ConfigError, match="line 4: more than 3 requests"):
        read_trace(written(tmp_path, line * 4))
    monkeypatch.setattr(traces, "MAX_BYTES", 100)
    with pytest.raises(ConfigError, match="line 3: more than 100 bytes in a trace"):
        read_trace(written(tmp_path, line * 4))
    monkeypatch.setattr(traces, "MAX_LINE_BYTES", 20)
    with pytest.raises(ConfigError, match="line 1: more than 20 bytes in a line"):
        read_trace(written(tmp_path, line))


def test_the_busiest_part_is_the_shortest() -> None:
    rng = random.Random(1)
    arrivals = sorted((Arrival(rng.random() ** 3 * 1e4, n, 1) for n in range(60)), key=lambda each: each.time_ms)
    part = busiest(arrivals, 10)
    assert len(part) == 10 and part[0].time_ms == 0
    spans = [arrivals[i + 9].time_ms - arrivals[i].time_ms for i in range(51)]
    assert part[-1].time_ms == min(spans)
    assert busiest(arrivals, 60) == arrivals
