"""A picker of the Gateway API inference extension learns what it needs from a router, by names that the chart gives."""

import asyncio
import re
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.client import complete_all, prompts
from tests.e2e.system import System
from tests.support.monitoring import CHART

pytestmark = pytest.mark.medium

OF_VLLM = ("vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc")
"""Queued, running, and the part of KV blocks in use: what a picker asks for unless it is told otherwise."""


def told_to_pickers() -> list[tuple[str, ...]]:
    """Return the names in the README of the chart, by flags and by configuration."""
    blocks = re.findall(r"(?s)```yaml\n(.*?)```", (CHART / "README.md").read_text(encoding="utf-8"))
    flags, configuration = (yaml.safe_load(block) for block in blocks)
    given = flags["inferenceExtension"]["flags"]
    kinds = ("total-queued-requests", "total-running-requests", "kv-cache-usage-percentage")
    [engine] = configuration["plugins"][0]["parameters"]["engineConfigs"]
    specs = ("queuedRequestsSpec", "runningRequestsSpec", "kvUsageSpec")
    assert given["lora-info-metric"] == given["cache-info-metric"] == ""
    return [tuple(given[f"{kind}-metric"] for kind in kinds), tuple(engine[spec] for spec in specs)]


async def test_a_picker_sees_what_waits_what_runs_and_how_full_the_blocks_are(
    checkpoint: Callable[[str], tuple[Path, Any]],
) -> None:
    directory, _ = checkpoint("qwen3-tied")
    named = [OF_VLLM, *told_to_pickers()]
    with System(directory, "--prefill-max-batch-tokens", "64", "--decode-max-num-seqs", "4").start() as system:

        def seen() -> dict[str, float]:
            """As a picker has it: the only sample of a gauge."""
            families = {family.name: family for family in text_string_to_metric_families(system.text("/metrics"))}
            found = {}
            for name in {name for names in named for name in names}:
                assert families[name].type == "gauge"
                [sample] = families[name].samples
                found[name] = sample.value
            return found

        def all_are(wanted: Callable[[float], bool]) -> bool:
            return all(map(wanted, seen().values()))

        assert all_are(lambda value: value == 0.0)
        asked = asyncio.create_task(complete_all(system.url, prompts(30, 100, 200, seed=3), max_tokens=20))
        peaks = dict.fromkeys(seen(), 0.0)
        while not asked.done():
            now = await asyncio.to_thread(seen)
            for names in named:
                assert [now[name] for name in names] == [now[name] for name in OF_VLLM]
            peaks = {name: max(peak, now[name]) for name, peak in peaks.items()}
        await asked
        for queued, running, usage in named:
            assert peaks[queued] >= 1 and peaks[running] >= 1 and 0.0 < peaks[usage] <= 1.0
        await asyncio.to_thread(system.until, lambda: all_are(lambda value: value == 0.0))


async def test_a_request_that_a_picker_sent_is_answered_as_any(
    checkpoint: Callable[[str], tuple[Path, Any]],
) -> None:
    directory, _ = checkpoint("qwen3-tied")
    with System(directory).start() as system:

        def answer(headers: dict[str, str]) -> Any:
            body = b'{"model": "m", "prompt": [1, 2, 3], "max_tokens": 4, "temperature": 0}'
            request = urllib.request.Request(
                f"{system.url}/v1/completions", body, {"Content-Type": "application/json", **headers}
            )
            with urllib.request.urlopen(request, timeout=60) as response:
                return yaml.safe_load(response.read())["choices"]

        sent = {"x-gateway-destination-endpoint": "10.0.0.1:8000", "x-request-id": "of-the-gateway"}
        assert await asyncio.to_thread(answer, sent) == await asyncio.to_thread(answer, {})
