"""Blocks by NIXL between two pools of one host, through staging: texts as of a single process."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.client import Reference, complete_all, prompts
from tests.e2e.system import System
from tests.e2e.test_prefixes import ANY_LENGTH, NUM_OUT
from tests.e2e.test_replies import pulled
from tests.support.nixl import has_nixl, secret_file

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(not has_nixl(), reason="nixl is not installed"),
]

Checkpoint = Callable[[str], tuple[Path, Any]]
FLAGS = ("--kv-transport", "nixl", "--kv-always-stage", "true", "--model-dtype", "float32", *ANY_LENGTH)
POOL = ("--kv-pool-bytes", str(64 << 20))


class Lending(System):
    """Memory servers have gates on loopback."""

    @property
    def router_endpoint(self) -> list[str]:
        secret = str(secret_file(Path(self.directory.name)))
        return [*super().router_endpoint, "--net-secret-file", secret, "--net-advertise", "127.0.0.1"]


@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.medium), pytest.param("cuda:0", marks=pytest.mark.gpu)]
)
async def test_texts_through_staging_are_those_of_one_process_and_replies_come_back(
    device: str, checkpoint: Checkpoint
) -> None:
    directory, model = checkpoint("qwen3-tied")
    reference, history = Reference(directory, model), prompts(4, 40, 120, seed=73)
    with Lending(directory, *FLAGS, *POOL, device=device).start(apart=True) as system:
        [path] = system.health()["kv_paths"]
        assert (path["transport"], path["error"]) == ("nixl tcp", "") and path["gb_per_s"] > 0
        for _ in range(2):
            answers = await complete_all(
                system.url, history, max_tokens=NUM_OUT, ignore_eos=True, return_token_ids=True
            )
            assert [each.text for each in answers] == [reference.text(p, NUM_OUT, ignore_eos=True) for p in history]
            history = [prompt + answer.ids + prompt[:20] for prompt, answer in zip(history, answers, strict=True)]
            await asyncio.to_thread(system.until, system.all_blocks_free)
        assert pulled(system, "decode-0") > 0
