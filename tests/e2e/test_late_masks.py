"""A step that runs a token again, because the token's mask was late, changes no state: texts stay as they were."""

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.client import complete_all, prompts
from tests.e2e.system import System

pytestmark = pytest.mark.medium

Checkpoint = Callable[[str], tuple[Path, Any]]


class LateSystem(System):
    """Masks of its decode workers are late."""

    def start_worker(self, name: str, *flags: str, module: str = "") -> None:
        is_decode = name.startswith("decode")
        super().start_worker(name, *flags, module=module or ("tests.e2e.late_decode" if is_decode else ""))


async def decode_on(url: str) -> None:
    """Keep a plain text in the batch, so that steps run while all masks are missing."""
    while True:
        [completion] = await complete_all(url, prompts(1, 10, 10), max_tokens=200, ignore_eos=True)
        assert completion.error is None


@pytest.mark.parametrize("variant", ["qwen3.5", "gemma3"])
async def test_late_masks_change_no_text(variant: str, checkpoint: Checkpoint) -> None:
    directory, _ = checkpoint(variant)
    asked, texts = prompts(4, 10, 60, seed=31), []
    for kind in (System, LateSystem):
        with kind(directory).start() as system:
            async with asyncio.TaskGroup() as group:
                plain = group.create_task(decode_on(system.url))
                completions = await complete_all(system.url, asked, guided_regex="[a-z ]{30}[0-9]{5}", max_tokens=60)
                plain.cancel()
            assert [completion.error for completion in completions] == [None] * len(asked)
            texts.append([completion.text for completion in completions])
            assert system.kill("decode-0", signal.SIGTERM) == 0  # so that its log is complete
            num_late = system.log("decode-0").count("a mask was late")
    num_decoded = sum(completion.num_tokens - 1 for completion in completions)  # the prefill worker chose the first
    assert num_late >= num_decoded >= 35 and texts[0] == texts[1]
    assert len(set(texts[0])) > 1 and all(text[-5:].isdigit() for text in texts[0])
