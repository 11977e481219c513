"""Workers that nobody gave a memory server share one all the same, and the last to leave ends it."""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.wire.messages.worker import SHARED_POOL
from tests.e2e.client import Reference, complete_all, prompts
from tests.e2e.system import START_TIMEOUT_S, System

pytestmark = pytest.mark.medium

Checkpoint = Callable[[str], tuple[Path, Any]]
WORKERS = ("prefill-0", "decode-0")
LINGER_S = 5.0


def start_lone(system: System, name: str) -> None:
    config = Path(system.directory.name) / "config.toml"
    config.write_text(f"[memory]\nlinger_s = {LINGER_S}\npoison_blocks = true\n")
    flags = ("--config", str(config), "--worker-memory-socket", "auto")
    system.start_worker(name, *flags, module="tests.e2e.lone")


async def test_lone_workers_share_one_pool_and_a_restarted_one_loads_no_weights(checkpoint: Checkpoint) -> None:
    directory, model = checkpoint("qwen3-tied")
    reference, asked = Reference(directory, model), prompts(4, 10, 60, seed=48)
    texts = [reference.text(prompt, 12) for prompt in asked]
    with System(directory) as system:
        system.start_router()
        for name in WORKERS:  # at once: either finds nobody
            start_lone(system, name)
        system.wait_ready(1, 1)
        [server] = system.health()["memory_servers"]
        assert sorted(server["workers"]) == sorted(WORKERS)
        assert {path["transport"] for path in system.health()["kv_paths"]} == {SHARED_POOL}
        assert [c.text for c in await complete_all(system.url, asked, max_tokens=12)] == texts

        for name in WORKERS:
            await asyncio.to_thread(system.kill, name)
            start_lone(system, name)
            system.until(lambda name=name: "ready to serve" in system.log(name), START_TIMEOUT_S)  # type: ignore[misc]
            assert "loading weights" not in system.log(name)
            assert "started a memory server" not in system.log(name)
        system.wait_ready(1, 1)
        assert [each["epoch"] for each in system.health()["memory_servers"]] == [server["epoch"]]
        assert [c.text for c in await complete_all(system.url, asked, max_tokens=12)] == texts
        system.until(system.all_blocks_free)

        for name in WORKERS:
            assert await asyncio.to_thread(system.kill, name, signal.SIGTERM) == 0, system.log(name)
        private = Path(system.directory.name) / f"baton-{os.getuid()}"
        system.until(lambda: not list(private.glob("memory-cpu-*.sock")))
        [log] = private.glob("memory-cpu-*.log")
        system.until(lambda: "memory.linger_s" in log.read_text())
