"""Workers that are traced leave a file each, and serve like others. Here all programs start as a user starts them."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.e2e.client import complete_all, prompts
from tests.e2e.programs import executed
from tests.e2e.system import System
from tests.traces import read_trace

Checkpoint = Callable[[str], tuple[Path, Any]]


async def test_each_worker_writes_its_steps_when_it_ends(checkpoint: Checkpoint, tmp_path: Path) -> None:
    directory, _ = checkpoint("qwen3-tied")
    trace = str(tmp_path / "trace.json")
    with System(directory, "--worker-trace-file", trace, launch=executed).start() as system:
        completions = await complete_all(system.url, prompts(4, 10, 60), max_tokens=12, ignore_eos=True)
        assert [c.error for c in completions] == [None] * 4
        system.until(system.all_blocks_free)
        assert [system.kill(name, signal.SIGTERM) for name in ("prefill-0", "decode-0")] == [0, 0]
        decode, no_device = read_trace(tmp_path / "trace-decode-0.json")
        assert not no_device
        names = [span["name"] for span in decode]
        assert names.count("launch") == names.count("collect") >= 11
        assert {"receive", "apply", "wait", "emit", "turn"} < set(names)
        prefill, _ = read_trace(tmp_path / "trace-prefill-0.json")
        assert {"receive", "schedule", "launch", "wait", "emit", "turn"} == {span["name"] for span in prefill}
        assert "host busy p50" in system.log("decode-0")
