"""Every sampling parameter writes the text that a single process writes, alone, in a batch and after a death."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from common.device.steps.warm_up import sampling_tensors
from common.ops.reference import sample
from common.wire.values.packing import pack_ids
from common.wire.values.sampling_params import SamplingParams
from tests.e2e.client import Completion, Reference, complete_all, prompts
from tests.e2e.held_system import HeldSystem, killed_while_streaming
from tests.e2e.system import System
from tests.support.adjusting import adjusted

pytestmark = pytest.mark.medium

Checkpoint = Callable[[str], tuple[Path, Any]]

ASKED: list[dict[str, Any]] = [
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.75},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.9, "presence_penalty": -1.0, "frequency_penalty": 2},
    {"logit_bias": {"7": 100, "9": 99.5}, "frequency_penalty": 0.5},
    {"allowed_token_ids": [5, 6, 8, 31, 32, 250], "frequency_penalty": 0.1},
    {"logit_bias": {"11": 100}, "stop_token_ids": [11], "min_tokens": 5},
    {"temperature": 0.7, "seed": 1},
    {"temperature": 1.5, "top_k": 5, "seed": 2},
    {"temperature": 1.0, "top_p": 0.6, "seed": 3},
    {"temperature": 2.0, "min_p": 0.1, "seed": 4},
    {"temperature": 1.3, "top_k": 30, "top_p": 0.8, "min_p": 0.02, "seed": -5},
    {"temperature": 0.9, "seed": 2**63 - 1, "repetition_penalty": 1.2, "allowed_token_ids": [*range(20, 200, 3)]},
    {},
]


NAMES = (
    "temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "min_tokens",
)  # fmt: skip


def wanted(directory: Path, model: Any, prompt: list[int], max_tokens: int, fields: dict[str, Any]) -> str:
    """Text of a single process, greedy unless `fields` have a temperature."""
    reference = Reference(directory, model)
    biases, ways = (
        fields.get("logit_bias", {}),
        (way for word in fields.get("bad_words", ()) for way in (word, f" {word}")),
    )
    params = SamplingParams(
        **{"temperature": 0.0} | {name: fields[name] for name in NAMES if name in fields},
        seed=fields.get("seed", 0) % (1 << 63),
        stop_token_ids=tuple(fields.get("stop_token_ids", ())),
        biased_token_ids=tuple(map(int, biases)),
        biases=tuple(biases.values()),
        allowed_token_ids=pack_ids(fields.get("allowed_token_ids", ())),
        bad_words=tuple(pack_ids(reference.tokenizer.encode(way).ids) for way in ways),
    )
    ids, past, num_cached = list(prompt), None, 0
    with torch.inference_mode():
        for _ in range(max_tokens):
            out = model(torch.tensor([ids[num_cached:]]), past_key_values=past, use_cache=True)
            past, num_cached = out.past_key_values, len(ids)
            logits = adjusted(out.logits[0, -1].float(), params, prompt, ids[len(prompt) :])
            ids.append(int(sample(logits[None], sampling_tensors([params], logits.device), torch.tensor([len(ids)]))))
            if ids[-1] in params.stop_token_ids:
                ids.pop()
                break
    return str(reference.tokenizer.decode(ids[len(prompt) :], skip_special_tokens=True))


async def test_texts_are_those_of_a_single_process_alone_and_among_others(checkpoint: Checkpoint) -> None:
    directory, model = checkpoint("qwen3-tied")
    asked = prompts(len(ASKED), 5, 60, seed=21)
    expected = [wanted(directory, model, p, 24, fields) for p, fields in zip(asked, ASKED, strict=True)]
    with System(directory, "--prefill-max-batch-tokens", "32").start() as system:

        async def one(prompt: list[int], fields: dict[str, Any]) -> Completion:
            return (await complete_all(system.url, [prompt], max_tokens=24, ignore_eos=True, **fields))[0]

        alone = [await one(prompt, fields) for prompt, fields in zip(asked, ASKED, strict=True)]
        together = await asyncio.gather(*map(one, asked * 2, ASKED * 2))
        assert [c.error for c in together] == [None] * 2 * len(asked)
        assert [c.text for c in alone] == expected
        assert [c.text for c in together] == expected * 2
        system.until(system.all_blocks_free)
    assert len({*expected}) == len(expected)


MAX_TOKENS = 60
PENALTIES: dict[str, Any] = {"frequency_penalty": 0.3, "presence_penalty": 0.5, "repetition_penalty": 1.1}


DRAWN: dict[str, Any] = {"temperature": 1.2, "top_k": 60, "top_p": 0.95, "min_p": 0.01, "seed": 7}
BANNED: dict[str, Any] = {
    "logit_bias": {"11": 9}, "allowed_token_ids": [*range(2, 250)], "stop_token_ids": [11], "min_tokens": MAX_TOKENS
}  # fmt: skip


@pytest.mark.parametrize(
    "fields", [PENALTIES, DRAWN, PENALTIES | DRAWN, BANNED], ids=["counted", "drawn", "both", "banned"]
)
async def test_after_a_death_a_text_goes_on_as_it_would_have(checkpoint: Checkpoint, fields: dict[str, Any]) -> None:
    directory, model = checkpoint("qwen3-tied")
    asked = prompts(4, 10, 60, seed=22)
    with HeldSystem(directory, "--prefill-max-batch-tokens", "32").start(decode=2) as system:
        texts = await killed_while_streaming(system, "decode-0", asked, MAX_TOKENS, **fields)
        assert texts == [wanted(directory, model, p, MAX_TOKENS, fields) for p in asked]
        assert "replayed" in system.log("router")


async def test_prompts_that_a_decode_worker_computes_are_counted_as_well(checkpoint: Checkpoint) -> None:
    directory, model = checkpoint("qwen3-tied")
    asked = prompts(4, 10, 60, seed=23)
    with System(directory, "--kv-transport", "none").start(prefill=False) as system:
        completions = await complete_all(system.url, asked, max_tokens=24, ignore_eos=True, **PENALTIES)
        assert [c.text for c in completions] == [wanted(directory, model, p, 24, PENALTIES) for p in asked]
