"""Traces of real workers: `baton trace` shows the steps that computed each request."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deploy.cli import main
from tests.e2e.client import complete_all, prompts
from tests.e2e.system import System
from tests.support.traces import names_of, read_events

pytestmark = pytest.mark.medium

Checkpoint = Callable[[str], tuple[Path, Any]]


async def test_the_steps_of_each_worker_name_the_requests_that_joined(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, _ = checkpoint("qwen3-tied")
    with System(directory, "--trace-dir", str(tmp_path), "--prefill-max-batch-tokens", "32").start() as system:
        streams = await complete_all(system.url, prompts(2, 40, 60), max_tokens=4, ignore_eos=True)
        assert [c.error for c in streams] == [None, None]
        for name in ("decode-0", "prefill-0"):
            assert system.kill(name, signal.SIGTERM) == 0
        assert "host busy p50" in system.log("decode-0")
    monkeypatch.setattr("sys.argv", ["baton", "trace", str(tmp_path), "--out", str(tmp_path / "out.json")])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    events = read_events(tmp_path / "out.json")
    names = names_of(events)
    assert sorted(names.values()) == ["decode-0", "prefill-0"]
    steps: dict[str, list[str]] = {name: [] for name in names.values()}
    for event in events:
        if event["name"] == "launch" and event["ph"] == "X":
            steps[names[event["pid"]]] += event["args"].get("requests", [])
    assert len(set(steps["prefill-0"])) == 2
    assert len(steps["prefill-0"]) >= 4, "each prompt has several chunks"
    assert sorted(steps["decode-0"]) == sorted(set(steps["prefill-0"]))
