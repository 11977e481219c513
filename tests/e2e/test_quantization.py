"""The whole path with quantized products writes what a single process prefers, by transformers."""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
import transformers
from tokenizers import Tokenizer

from tests.e2e.system import System
from tests.support import packers
from tests.support.guided import DEMO_MODEL
from tests.support.packed_checkpoints import FP8, INT8_ROWS, Case, pack_checkpoint
from tests.support.quantized import quantized_copy, quantized_inputs, with_quantized_head

BEGINNINGS = (
    "ROMEO:\n", "First Citizen:\nBefore we proceed", "What, my lord?", "KING RICHARD:\nNow is the winter of", "JULIET:",
    "O, she doth teach the torches", "A horse! a horse!", "The",
)  # fmt: skip
MAX_TOKENS = 32
CASES = {
    "fp8-blocks": Case(FP8, packers.fp8_blocks()),
    "int8-rows": Case(INT8_ROWS, packers.int8_rows),
}
INPUTS = {"fp8-blocks": ("fp8", 128), "int8-rows": ("int8", 0)}
"""Schemes of inputs, and the columns that share a scale."""
FLIPPED = 0.5
"""Of what tokens are behind the best by with plain products: a number on the edge of two codes may take either."""


@pytest.mark.medium
@pytest.mark.parametrize("case", CASES)
async def test_tokens_in_codes_of_the_checkpoint_are_the_best_of_a_single_process(case: str, tmp_path: Path) -> None:
    packed, plain_dir = tmp_path / "packed", tmp_path / "plain"
    for directory in (packed, plain_dir):
        shutil.copytree(DEMO_MODEL, directory)
    pack_checkpoint(packed, plain_dir, CASES[case], evenly=True)
    plain = transformers.AutoModelForCausalLM.from_pretrained(plain_dir, dtype=torch.float32)
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    asked = [tokenizer.encode(text).ids for text in BEGINNINGS]
    with System(packed).start() as system:
        texts = await asyncio.gather(*(tokens_of(system.url, prompt) for prompt in asked))
        assert "28 of 28 matrices stay in 8 bits" in system.log("prefill-0") + system.log("decode-0")
        system.until(system.all_blocks_free)
    held = quantized_inputs(plain, *INPUTS[case])
    assert sum(map(len, texts)) > 4 * MAX_TOKENS
    ours, of_plain = (
        sum(sum(gap(each, prompt, ids)) for prompt, ids in zip(asked, texts, strict=True)) for each in (held, plain)
    )
    assert ours < FLIPPED * of_plain, "as far behind as with plain inputs"


@pytest.mark.medium
@pytest.mark.parametrize("scheme", ["fp8", "int8"])
async def test_greedy_tokens_are_the_best_of_a_single_process(scheme: str) -> None:
    plain = transformers.AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    flags = ("--model-quantization", scheme, "--model-head", scheme)
    asked = [tokenizer.encode(text).ids for text in BEGINNINGS]
    with System(DEMO_MODEL, *flags, router_flags=flags).start() as system:
        texts = await asyncio.gather(*(tokens_of(system.url, prompt) for prompt in asked))
        system.until(system.all_blocks_free)
    quantized = with_quantized_head(quantized_copy(plain, scheme), scheme)
    assert sum(map(len, texts)) > 4 * MAX_TOKENS
    ours, unquantized = (
        sum(sum(gap(each, prompt, ids)) for prompt, ids in zip(asked, texts, strict=True))
        for each in (quantized, plain)
    )
    assert ours < FLIPPED * unquantized, "as far behind as with plain products"


async def tokens_of(url: str, prompt: list[int]) -> list[int]:
    body = {"prompt": prompt, "temperature": 0, "max_tokens": MAX_TOKENS, "return_token_ids": True}
    async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/completions", json=body) as response:
        [choice] = (await response.json())["choices"]
    return list(choice["token_ids"])


@torch.inference_mode()
def gap(model: Any, prompt: list[int], ids: list[int]) -> list[float]:
    """How far the logit of each token is below the best in its place."""
    logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(ids)[:, None])[:, 0]
    behind: list[float] = (logits.amax(-1) - chosen).tolist()
    return behind
