"""With keys and values in e4m3, texts are those of a single process that keeps them so, wherever blocks have been."""

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.e2e.client import Reference, complete_all, prompts
from tests.e2e.held_system import HeldSystem, held_while_streaming
from tests.e2e.rounded_cache import RoundedCache
from tests.e2e.slow_system import SlowSystem
from tests.e2e.system import System
from tests.e2e.test_prefixes import ANY_LENGTH, BLOCK, NUM_OUT, ask, converse, full, metric, pulled_by
from tests.e2e.test_replies import pulled, quiet
from tests.support.checkpoints import write_checkpoint
from tests.support.packed_checkpoints import CASES, SIZES, pack_checkpoint

pytestmark = pytest.mark.timeout(240)

DIRECTORY = Path("deploy/demo_model")
FP8 = ("--kv-dtype", "fp8", *ANY_LENGTH)
NEAR_TIE = 0.02  # between logits
BLOCK_BYTES = 4 * 2 * BLOCK * 2 * 64  # layers, keys and values, tokens, heads, dimensions: a byte each


@pytest.fixture(scope="module")
def reference() -> Iterator[Reference]:
    model = AutoModelForCausalLM.from_pretrained(DIRECTORY, dtype=torch.float32)
    yield Reference(DIRECTORY, model, lambda: RoundedCache(config=model.config))


def pool_of(num_blocks: int) -> tuple[str, ...]:
    return (*FP8, "--kv-pool-bytes", str(num_blocks * BLOCK_BYTES))


@pytest.mark.medium
@pytest.mark.parametrize(
    "flags", [(), ("--prefill-max-batch-tokens", "48"), ("--kv-block-size", "64"), ("--worker-batching", "false")]
)
async def test_texts_are_those_of_rounded_keys_and_values(reference: Reference, flags: tuple[str, ...]) -> None:
    asked = prompts(8, 1, 200, seed=61)
    with System(DIRECTORY, *FP8, *flags).start() as system:
        fields: dict[str, Any] = {"max_tokens": NUM_OUT, "ignore_eos": True, "return_token_ids": True}
        completions = await complete_all(system.url, asked, **fields)
        expected = reference.texts(asked, completions, NUM_OUT)
        assert [each.text for each in completions] == expected
        plain = Reference(DIRECTORY, reference.model)
        assert expected != [plain.text(prompt, NUM_OUT, ignore_eos=True) for prompt in asked], "rounding shows nowhere"
        await converse(system, reference, 64 if "64" in flags else BLOCK)


@pytest.mark.medium
async def test_pulled_blocks_and_replies_on_the_way_back_give_the_same_text(reference: Reference) -> None:
    [history, *questions] = prompts(3, 40, 70, seed=62)
    with SlowSystem(DIRECTORY, *FP8).start(apart=True) as system:
        for question in [[], *questions]:
            await quiet(system)
            history, num_pulled = await pulled_by(system, reference, history + question)
            assert num_pulled > 0
        assert pulled(system, "prefill-0") > 0, "no reply was taken from the decode worker's pool"
        system.until(system.all_blocks_free)


@pytest.mark.medium
async def test_a_replay_and_a_sequence_that_made_room_go_on_alike(reference: Reference) -> None:
    """Sums in another order may move a number on the edge of two codes, so near ties may end either way."""
    asked = prompts(6, 60, 90, seed=63)
    with HeldSystem(DIRECTORY, *pool_of(46)).start(decode=2) as system:
        task = await held_while_streaming(system, asked, 60, return_token_ids=True)
        await asyncio.to_thread(system.kill, "decode-0")
        system.release()
        completions = await task
        assert [len(each.ids) for each in completions] == [60] * len(asked)
        texts = list(zip(asked, (each.ids for each in completions), strict=True))
        assert max(reference.behind(*text) for text in texts) < NEAR_TIE
        plain = Reference(DIRECTORY, reference.model)
        assert max(plain.behind(*text) for text in texts) > 2 * NEAR_TIE, "rounding shows nowhere"
        assert "out of KV blocks" in system.log("decode-1"), "nothing was preempted: the pool is too large for the test"
        assert re.search("replayed after .*: decode-0: .*process end", system.log("router"))
        system.until(system.all_blocks_free)


@pytest.mark.medium
async def test_blocks_from_the_host_tier_give_the_same_text(reference: Reference) -> None:
    first, *others = prompts(4, 180, 200, seed=64)
    tier = ("--memory-host-tier-bytes", str(400 * BLOCK_BYTES))
    with SlowSystem(DIRECTORY, *pool_of(20), memory_flags=tier).start() as system:
        for prompt in (first, *others):
            assert (await ask(system, prompt)).texts == [reference.text(prompt, NUM_OUT, ignore_eos=True)]
        warm = await ask(system, first)
        assert (warm.num_cached, warm.texts) == (
            full(len(first) - 1),
            [reference.text(first, NUM_OUT, ignore_eos=True)],
        )
        [server] = system.health()["memory_servers"]
        assert server["restored_blocks"] > 0
        assert metric(system, "baton_cached_prompt_tokens_total") == warm.num_cached


@pytest.mark.medium
async def test_no_block_goes_to_a_worker_that_keeps_other_numbers(reference: Reference) -> None:
    [prompt] = prompts(1, 60, 60, seed=65)
    with System(DIRECTORY, *ANY_LENGTH) as system:
        system.homes = {"decode-0": "memory-decode"}
        system.start_router()
        system.start_worker("prefill-0", "--kv-dtype", "fp8")
        system.start_worker("decode-0")
        system.until(lambda: any(path["error"] for path in system.health()["kv_paths"]))
        [path] = system.health()["kv_paths"]
        assert "groups[0].dtype: 'float32' here, 'float8_e4m3fn' there" in path["error"]
        text = Reference(DIRECTORY, reference.model).text(prompt, NUM_OUT, ignore_eos=True)
        assert (await ask(system, prompt)).texts == [text], "the decode worker computes the prompt itself"


@pytest.mark.medium
async def test_scales_of_a_checkpoint_arrive(tmp_path: Path) -> None:
    """Each layer has scales of its own, without which numbers would be rounded to other ones, or cut."""
    packed, plain = tmp_path / "packed", tmp_path / "plain"
    for directory in (packed, plain):
        directory.mkdir()
    write_checkpoint("qwen3-untied", packed, sizes=SIZES, dtype=torch.bfloat16)
    pack_checkpoint(packed, plain, CASES["fp8-modelopt"]())
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    scales = [(0.004 + 0.001 * layer, 0.0005 + 0.0003 * layer) for layer in range(model.config.num_hidden_layers)]
    path = packed / "model.safetensors"
    tensors = load_file(path)
    for layer, pair in enumerate(scales):
        for letter, scale in zip("kv", pair, strict=True):
            tensors[f"model.layers.{layer}.self_attn.{letter}_scale"] = torch.tensor(scale)
    save_file(tensors, path)
    scaled = Reference(packed, model, lambda: RoundedCache(config=model.config, scales=scales))
    unscaled = Reference(packed, model, lambda: RoundedCache(config=model.config))
    asked = prompts(6, 40, 120, seed=66)
    expected = [scaled.text(prompt, NUM_OUT, ignore_eos=True) for prompt in asked]
    assert expected != [unscaled.text(prompt, NUM_OUT, ignore_eos=True) for prompt in asked]
    flags = ("--model-quantization", "plain")  # inputs of products are not quantized
    with System(packed, *FP8, *flags, router_flags=flags).start() as system:
        completions = await complete_all(system.url, asked, max_tokens=NUM_OUT, ignore_eos=True)
        assert [each.text for each in completions] == expected
