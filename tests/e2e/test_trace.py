"""A trace over all processes, through a death: one flow a request, phases as its client was told, nesting slices.

Here programs start as a user starts them, but for the decode workers, which a test holds.
"""

import asyncio
import json
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import aiohttp
import pytest

from common.base.trace_events import flow_id
from deploy.cli import main
from tests.e2e.client import Completion, complete_all, prompts
from tests.e2e.held_system import FEW, HeldSystem, begun
from tests.e2e.programs import Program, executed, forked
from tests.support.traces import Event, flow_of, names_of, read_events, slices_of

pytestmark = pytest.mark.medium

Checkpoint = Callable[[str], tuple[Path, Any]]
WAYS = {"queued_ms": "queued", "prefill_ms": "prefill", "handoff_ms": "handoff", "decode_ms": "decode"}


class Started(HeldSystem):
    """Of which only decode workers are held, and forked."""

    def __init__(self, model: Path, *flags: str, router_flags: Sequence[str]) -> None:
        super().__init__(model, *flags, router_flags=router_flags)
        self.launch = launch

    def start_worker(self, name: str, *flags: str, module: str = "") -> None:
        super().start_worker(name, *flags, module=module or ("prefill_worker" if name.startswith("prefill") else ""))


def launch(module: str, flags: Sequence[str], output: BinaryIO) -> Program:
    return (forked if "decode" in module else executed)(module, flags, output)


async def test_a_flow_leads_each_request_through_all_processes_and_through_a_death(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, _ = checkpoint("qwen3-tied")
    traced = ("--trace-dir", str(tmp_path))
    flags = (*traced, "--prefill-max-batch-tokens", "32")
    with Started(directory, *flags, router_flags=traced).start(decode=2, apart=True) as system:
        timings = await asyncio.gather(*(timing(system.url, prompt) for prompt in prompts(2, 40, 60, seed=1)))
        streams = [Completion(), Completion()]
        system.holds.texts.set(FEW)
        asked = complete_all(system.url, prompts(2, 40, 60), streams, max_tokens=12, ignore_eos=True)
        task = asyncio.create_task(asked)
        await begun(task, streams)
        num_there = 1 + sum(told["timing"]["decode_worker"] == "decode-0" for told in timings)
        await asyncio.to_thread(system.until, lambda: len(launched(tmp_path, "decode.decode-0.*")) >= num_there)
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
        assert_way(events, names, args)
    for told in timings:
        [args] = [args for args in ended if args["request"] == f"{told['id']}-0"]
        assert {key: args[key] for key in told["timing"]} == told["timing"]


def assert_way(events: list[Event], names: dict[int, str], args: dict[str, Any]) -> None:
    """The flow of a completion, where it led, and that its phases add up to what was told of them."""
    request_id = args["request"]
    stops = [(names[e["pid"]], e["name"]) for e in flow_of(events, flow_id(request_id))]
    assert stops[0] == ("router", "queued")
    assert stops[-1] == ("router", "finish")
    assert stops.count(("router", "queued")) == args["attempts"]
    last = stops[len(stops) - stops[::-1].index(("router", "queued")) :]
    decode = args["decode_worker"]
    way = [("prefill-0", "wait"), ("prefill-0", "launch"), ("prefill-0", "emit"), (decode, "handoff")]
    way += [(decode, "pull"), (decode, "launch"), (decode, "collect"), ("router", "finish")]
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


def launched(directory: Path, pattern: str) -> set[str]:
    """Completions of which a worker has written the first step, and so all before it."""
    lines = [line for path in directory.glob(pattern) for line in path.read_text().splitlines(keepends=True)]
    events = [json.loads(line) for line in lines if line.endswith("\n")]
    return {each for e in events if e["name"] == "launch" for each in e.get("args", {}).get("requests", ())}


def baton(monkeypatch: pytest.MonkeyPatch, *argv: str) -> int:
    """Its exit status."""
    monkeypatch.setattr("sys.argv", ["baton", *argv])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)
