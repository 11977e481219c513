"""A trace over all processes, through a death: one flow a request, phases as its client was told, nesting slices."""

import asyncio
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from common.trace_events import flow_id
from deploy.cli import main
from tests.e2e.client import Completion, complete_all, prompts
from tests.e2e.held_system import FEW, HeldSystem, begun
from tests.e2e.programs import executed
from tests.traces import Event, flow_of, names_of, read_events, slices_of

Checkpoint = Callable[[str], tuple[Path, Any]]
WAYS = {"queued_ms": "queued", "prefill_ms": "prefill", "handoff_ms": "handoff", "decode_ms": "decode"}


@pytest.mark.parametrize("apart", [False, True], ids=["in one pool", "pulled"])
async def test_a_flow_leads_each_request_through_all_processes_and_through_a_death(
    apart: bool, checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, _ = checkpoint("qwen3-tied")
    traced = ("--trace-dir", str(tmp_path))
    flags = (*traced, "--prefill-max-batch-tokens", "32")
    held = HeldSystem(directory, *flags, router_flags=traced)
    held.launch = held.launch if apart else executed
    with held.start(decode=2, apart=apart) as system:
        timings = await asyncio.gather(*(timing(system.url, prompt) for prompt in prompts(2, 40, 60, seed=1)))
        streams = [Completion(), Completion()]
        system.holds.texts.set(FEW)
        asked = complete_all(system.url, prompts(2, 40, 60), streams, max_tokens=12, ignore_eos=True)
        task = asyncio.create_task(asked)
        await begun(task, streams)
        await asyncio.to_thread(system.until, lambda: all_traced(tmp_path, "decode.decode-0.*", "launch"))
        await asyncio.to_thread(system.kill, "decode-0")
        system.release()
        assert [c.error for c in await task] == [None, None]
        system.until(system.all_blocks_free)
        for name in ("decode-1", "prefill-0", "router"):
            assert await asyncio.to_thread(system.kill, name, signal.SIGTERM) == 0
        assert "host busy p50" in system.log("decode-1")

    assert baton(monkeypatch, "trace", str(tmp_path), "--out", str(tmp_path / "out.json")) == 0
    events = read_events(tmp_path / "out.json")
    names = names_of(events)
    assert sorted(names.values()) == ["decode-0", "decode-1", "prefill-0", "router"]
    ended = [e["args"] for e in events if e["name"] == "request" and e["ph"] == "X"]
    assert sorted(args["attempts"] for args in ended)[:2] == [1, 1]
    assert max(args["attempts"] for args in ended) == 2, "what decode-0 had was replayed"
    for args in ended:
        assert_way(events, names, args, apart=apart)
    for told in timings:
        [args] = [args for args in ended if args["request"] == f"{told['id']}-0"]
        assert {key: args[key] for key in told["timing"]} == told["timing"]


def assert_way(events: list[Event], names: dict[int, str], args: dict[str, Any], *, apart: bool) -> None:
    """The flow of a completion, where it led, and that its phases add up to what was told of them."""
    request_id = args["request"]
    stops = [(names[e["pid"]], e["name"]) for e in flow_of(events, flow_id(request_id))]
    assert stops[0] == ("router", "queued")
    assert stops[-1] == ("router", "finish")
    assert stops.count(("router", "queued")) == args["attempts"]
    last = stops[len(stops) - stops[::-1].index(("router", "queued")) :]
    decode = args["decode_worker"]
    way = [("prefill-0", "launch"), ("prefill-0", "emit"), (decode, "handoff")]
    way += [(decode, "pull")] * apart + [(decode, "launch"), (decode, "collect"), ("router", "finish")]
    assert list(dict.fromkeys(last)) == way
    assert last.count(("prefill-0", "launch")) >= 2, "the prompt has several chunks"
    mine = slices_of(events, request_id)
    for key, phase in WAYS.items():
        took_us = sum(e["dur"] for e in mine if e["name"] == phase and names[e["pid"]] == "router")
        assert took_us == pytest.approx(args[key] * 1e3, abs=2.0)
    attempts = {e["args"]["attempt"] for e in mine if names[e["pid"]] == "router" and "attempt" in e["args"]}
    assert attempts == set(range(args["attempts"]))


async def timing(url: str, prompt: list[int]) -> dict[str, Any]:
    """A response, and what its client was told of its way."""
    body = {"prompt": prompt, "max_tokens": 4, "ignore_eos": True}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}/v1/completions", json=body, headers={"X-Baton-Timing": "1"}) as response,
    ):
        told = await response.json()
    return {"id": told["id"], "timing": told["timing"][0]}


def all_traced(directory: Path, pattern: str, name: str) -> bool:
    """Whether a process has written such a slice of a request."""
    lines = [line for path in directory.glob(pattern) for line in path.read_text().splitlines(keepends=True)]
    events = [json.loads(line) for line in lines if line.endswith("\n")]
    return any(e["name"] == name and "requests" in e.get("args", {}) for e in events)


def baton(monkeypatch: pytest.MonkeyPatch, *argv: str) -> int:
    """Its exit status."""
    monkeypatch.setattr("sys.argv", ["baton", *argv])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)
