"""The whole path on a GPU: blocks through a CUDA IPC handle, decode from CUDA graphs, same text."""

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from common.wire.messages.worker import SHARED_POOL
from tests.e2e.client import Completion, Reference, complete_all, prompts
from tests.e2e.rounded_cache import RoundedCache
from tests.e2e.schemas import complete_schemas
from tests.e2e.system import START_TIMEOUT_S, System
from tests.e2e.test_prefixes import ANY_LENGTH, BLOCK, converse
from tests.support.checkpoints import VARIANTS
from tests.support.guided import DEMO_MODEL, is_valid, random_root

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

Checkpoint = Callable[[str], tuple[Path, Any]]
FLAGS = ("--model-dtype", "float32", "--kv-pool-bytes", str(64 << 20), "--decode-max-num-seqs", "12")


async def texts(system: System, asked: list[list[int]], **fields: Any) -> list[str]:
    completions = await complete_all(system.url, asked, **fields)
    assert [c.error for c in completions] == [None] * len(asked)
    return [c.text for c in completions]


@pytest.mark.parametrize("variant", VARIANTS)
async def test_text_equals_a_single_process(variant: str, checkpoint: Checkpoint) -> None:
    directory, model = checkpoint(variant)
    reference, asked = Reference(directory, model), prompts(16, 1, 200, seed=20)
    with System(directory, *FLAGS, device="cuda:0").start() as system:
        assert system.health()["kv_paths"][0]["transport"] == SHARED_POOL
        assert "graphs for 1 to 12 rows" in system.log("decode-0")
        assert await texts(system, asked, max_tokens=32) == [reference.text(p, 32) for p in asked]
        system.until(system.all_blocks_free)


async def test_weights_of_a_memory_server_give_the_same_text_and_outlive_their_loader(
    checkpoint: Checkpoint,
) -> None:
    directory, model = checkpoint("qwen3-untied")
    reference, asked = Reference(directory, model), prompts(8, 1, 120, seed=23)
    expected = [reference.text(p, 24) for p in asked]
    with System(directory, *FLAGS, device="cuda:0").start() as system:
        assert await texts(system, asked, max_tokens=24) == expected
        for name in ("prefill-0", "decode-0"):
            await asyncio.to_thread(system.kill, name)
            system.start_worker(name)
            system.until(lambda name=name: "ready to serve" in system.log(name), START_TIMEOUT_S)  # type: ignore[misc]
            assert "loading weights" not in system.log(name)
        assert await texts(system, asked, max_tokens=24) == expected


@pytest.mark.parametrize(
    "flags",
    [
        ("--worker-cuda-graphs", "false"),
        ("--worker-batching", "false"),
        ("--prefill-max-batch-tokens", "48"),
        ("--prefill-sm-share", "50"),
        ("--kv-transport", "none"),
        ("--worker-device", "auto"),
        ("--decode-short-prompt-tokens", "64"),
        ("--kernels-norm", "torch"),
        ("--kernels-rope", "torch"),
        ("--kernels-activation", "torch"),
        ("--kernels-prefill-attention", "torch"),
        ("--kernels-decode-attention", "torch"),
        ("--kernels-sampling", "torch"),
    ],
    ids=lambda flags: " ".join(flags),
)
async def test_switches_change_nothing_but_speed(flags: tuple[str, ...], checkpoint: Checkpoint) -> None:
    directory, model = checkpoint("qwen3-tied")
    reference, asked = Reference(directory, model), prompts(6, 1, 120, seed=21)
    with System(directory, *FLAGS, *flags, device="cuda:0").start(prefill="none" not in flags) as system:
        assert await texts(system, asked, max_tokens=16) == [reference.text(p, 16) for p in asked]


async def test_a_conversation_is_computed_once(checkpoint: Checkpoint) -> None:
    directory, model = checkpoint("qwen3-tied")
    with System(directory, *FLAGS, *ANY_LENGTH, device="cuda:0").start() as system:
        await converse(system, Reference(directory, model), BLOCK)


async def test_a_decode_worker_dies_mid_stream(checkpoint: Checkpoint) -> None:
    directory, model = checkpoint("qwen3-tied")
    reference, asked = Reference(directory, model), prompts(6, 10, 60, seed=22)
    with System(directory, *FLAGS, device="cuda:0").start(decode=2) as system:
        task = asyncio.create_task(texts(system, asked, max_tokens=400, ignore_eos=True))
        await asyncio.sleep(0.25)
        await asyncio.to_thread(system.kill, "decode-0")
        assert await task == [reference.text(p, 400, ignore_eos=True) for p in asked]
        assert "attempt" in system.log("router")
        system.until(system.all_blocks_free)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
async def test_blocks_travel_between_gpus(checkpoint: Checkpoint) -> None:
    directory, model = checkpoint("qwen3-tied")
    reference, asked = Reference(directory, model), prompts(16, 1, 200, seed=23)
    with System(directory, *FLAGS, device="cuda:0") as system:
        system.start_router()
        system.start_memory()
        system.start_memory("memory-decode", "--memory-device", "cuda:1")
        system.homes = {"decode-0": "memory-decode"}
        system.start_worker("prefill-0")
        system.start_worker("decode-0", "--worker-device", "cuda:1")
        system.wait_ready(1, 1)
        assert system.health()["kv_paths"][0]["transport"] == "cuda_ipc"
        assert await texts(system, asked, max_tokens=32) == [reference.text(p, 32) for p in asked]
        system.until(system.all_blocks_free)


async def test_blocks_are_pulled_out_of_another_pool_on_the_same_gpu(checkpoint: Checkpoint) -> None:
    directory, model = checkpoint("qwen3-tied")
    reference, asked = Reference(directory, model), prompts(16, 1, 200, seed=24)
    with System(directory, *FLAGS, device="cuda:0").start(apart=True) as system:
        assert system.health()["kv_paths"][0]["transport"] == "cuda_ipc"
        assert await texts(system, asked, max_tokens=32) == [reference.text(p, 32) for p in asked]
        system.until(system.all_blocks_free)


async def test_keys_and_values_in_fp8_give_nearly_the_text_of_rounded_ones() -> None:
    """The model is in bfloat16, so its texts part from those in float32 after some tokens."""
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    reference = Reference(DEMO_MODEL, model, lambda: RoundedCache(config=model.config))
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    lines = Path("README.md").read_text().split("\n\n")
    asked = [tokenizer.encode(line).ids[:400] for line in lines if len(line) > 100][:8]
    flags = ("--kv-dtype", "fp8", "--kv-pool-bytes", str(64 << 20), *ANY_LENGTH)
    with System(DEMO_MODEL, *flags, device="cuda:0").start() as system:
        assert "KV pool in float8_e4m3fn" in system.log("decode-0")
        for _ in range(2):  # then behind cached prefixes
            ours = await texts(system, asked, max_tokens=8, ignore_eos=True)
            theirs = [reference.text(prompt, 8, ignore_eos=True) for prompt in asked]
            assert sum(a[:4] == b[:4] for a, b in zip(ours, theirs, strict=True)) >= len(asked) - 2
        system.until(system.all_blocks_free)


async def test_texts_are_held_to_a_form_while_masks_come_during_steps() -> None:
    schemas = [random_root(random.Random(4000 + seed)) for seed in range(40)]
    with System(DEMO_MODEL, "--kv-pool-bytes", str(64 << 20), device="cuda:0").start() as system:
        completions = [Completion() for _ in schemas]
        await complete_schemas(system.url, schemas, completions)
        for schema, completion in zip(schemas, completions, strict=True):
            assert completion.error is None
            assert completion.finish_reason == "length" or is_valid(completion.text, schema), completion.text
        system.until(system.all_blocks_free)
