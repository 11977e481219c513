"""Log-probabilities are transformers', of the tokens that the text is made of, whatever else is asked for or dies."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch

from tests.e2e.client import TIMEOUT, prompts
from tests.e2e.held_system import HeldSystem
from tests.e2e.programs import ROOT
from tests.e2e.system import System

pytestmark = pytest.mark.medium

Checkpoint = Callable[[str], tuple[Path, Any]]
TOLERANCE = 1e-3  # fp32: a norm behind a state amplifies rounding
Choice = dict[str, Any]
DEMO = ROOT / "deploy" / "demo_model"
ASKED: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True, "return_token_ids": True, "logprobs": 5}


async def choice(url: str, prompt: list[int], **fields: Any) -> Choice:
    """The only choice of a response; pieces of a stream put together."""
    body = {"prompt": prompt, "temperature": 0, **ASKED, **fields}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}/v1/completions", json=body, timeout=TIMEOUT) as response,
    ):
        text = await response.text()
        assert response.status == 200, text
    if not fields.get("stream"):
        [whole] = json.loads(text)["choices"]
        return dict(whole)
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    pieces = [piece for event in events for piece in event["choices"]]
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    logprobs = {name: [value for piece in pieces for value in piece["logprobs"][name]] for name in names}
    token_ids = [token_id for piece in pieces for token_id in piece["token_ids"]]
    return {"text": "".join(piece["text"] for piece in pieces), "token_ids": token_ids, "logprobs": logprobs}


def check(model: Any, prompt: list[int], answer: Choice, num_top: int) -> None:
    """Against the logits of one pass over prompt and text; numbers of equal tokens are equal to the last bit."""
    told, ids = answer["logprobs"], answer["token_ids"]
    with torch.inference_mode():
        law = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1].log_softmax(dim=-1)
    assert told["token_logprobs"] == pytest.approx(
        law.gather(1, torch.tensor(ids)[:, None])[:, 0].tolist(), abs=TOLERANCE
    )
    for i, (token, value, top) in enumerate(zip(*list(told.values())[:3], strict=True)):
        assert top[token] == value
        likeliest = law[i].topk(num_top)
        named = {f"token_id:{token_id}" for token_id in [ids[i], *likeliest.indices.tolist()]}
        assert set(top) == named
        assert sorted(top.values(), reverse=True)[:num_top] == pytest.approx(likeliest.values.tolist(), abs=TOLERANCE)


def load(variant: str, checkpoint: Checkpoint) -> tuple[Path, Any]:
    """Directory and transformers model of a tiny random one, or of the demo model."""
    if variant != "demo":
        return checkpoint(variant)
    from transformers import AutoModelForCausalLM

    return DEMO, AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()


EACH_MODEL = pytest.mark.parametrize("variant", ["qwen3-tied", "qwen3.5", "gemma4", "gpt-oss-mxfp4", "demo"])


@EACH_MODEL
async def test_they_are_those_of_a_single_process_streamed_or_not(variant: str, checkpoint: Checkpoint) -> None:
    directory, model = load(variant, checkpoint)
    asked = prompts(6, 5, 80, seed=31)
    numbers = [0, 1, 5, 20, 5, 5]
    biased = {"temperature": 1.0, "seed": 5, "logit_bias": {"7": 3}}
    changed: list[dict[str, Any]] = [{}, {}, {}, {}, {"frequency_penalty": 0.7}, biased]
    with System(directory, "--prefill-max-batch-tokens", "32").start() as system:

        async def one(i: int, *, stream: bool) -> Choice:
            fields = {"logprobs": numbers[i], "return_tokens_as_token_ids": True, "stream": stream, **changed[i]}
            return await choice(system.url, asked[i], **fields)

        answers = await asyncio.gather(*(one(i, stream=stream) for i in range(6) for stream in (False, True)))
        plain = await choice(system.url, asked[0], logprobs=None)
    for i, prompt in enumerate(asked):
        whole, streamed = answers[2 * i : 2 * i + 2]
        check(model, prompt, whole, numbers[i])
        assert whole["token_ids"] == streamed["token_ids"] and whole["text"] == streamed["text"]
        assert whole["logprobs"]["text_offset"] == streamed["logprobs"]["text_offset"]
        check(model, prompt, streamed, numbers[i])
    assert plain["logprobs"] is None and plain["token_ids"] == answers[0]["token_ids"]


async def num_generated(url: str) -> float:
    """Tokens of all requests so far."""
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as response:
        lines = (await response.text()).splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("baton_generation_tokens_total"))


@pytest.mark.parametrize("flags", [("--kv-transport", "none"), ()], ids=["local prompts", "killed"])
async def test_they_go_on_where_they_were_after_a_death(flags: tuple[str, ...], checkpoint: Checkpoint) -> None:
    directory, model = checkpoint("qwen3-tied")
    asked = prompts(4, 10, 40, seed=32)
    fields = {"max_tokens": 150, "return_tokens_as_token_ids": True}
    with HeldSystem(directory, *flags).start(prefill=not flags, decode=2) as system:
        system.holds.texts.set(8)
        tasks = [asyncio.create_task(choice(system.url, prompt, **fields)) for prompt in asked]
        while await num_generated(system.url) < 8 * len(asked):
            await asyncio.sleep(0.01)
        workers = (await asyncio.to_thread(system.health))["workers"]["decode"]
        busiest = max(workers, key=lambda worker: int(worker["assigned_sequences"]))
        await asyncio.to_thread(system.kill, busiest["id"])
        system.release()
        for prompt, answer in zip(asked, await asyncio.gather(*tasks), strict=True):
            assert len(answer["token_ids"]) == 150
            check(model, prompt, answer, 5)
        assert "replayed" in system.log("router")


def check_prompt(model: Any, prompt: list[int], answer: Choice, num_top: int) -> None:
    """Both shapes against the logits of one pass over the prompt."""
    with torch.inference_mode():
        law = model(torch.tensor([prompt])).logits[0].log_softmax(dim=-1)
    own = [law[i - 1, prompt[i]].item() for i in range(1, len(prompt))]
    told = {name: values[: len(prompt)] for name, values in answer["logprobs"].items()}
    assert told["tokens"] == [f"token_id:{token_id}" for token_id in prompt]
    assert told["token_logprobs"][0] is told["top_logprobs"][0] is answer["prompt_logprobs"][0] is None
    assert told["token_logprobs"][1:] == pytest.approx(own, abs=TOLERANCE)
    for i, (top, by_id) in enumerate(zip(told["top_logprobs"][1:], answer["prompt_logprobs"][1:], strict=True)):
        likeliest = law[i].topk(num_top)
        assert sorted(top.values(), reverse=True)[:num_top] == pytest.approx(likeliest.values.tolist(), abs=TOLERANCE)
        assert set(top) == {f"token_id:{token_id}" for token_id in [prompt[i + 1], *likeliest.indices.tolist()]}
        entry = by_id[str(prompt[i + 1])]
        assert entry["logprob"] == top[f"token_id:{prompt[i + 1]}"] and len(by_id) <= 2
        assert (law[i] > own[i] + 1e-4).sum() < entry["rank"] <= (law[i] >= own[i] - 1e-4).sum()


ECHOED: dict[str, Any] = {
    "echo": True, "prompt_logprobs": 1, "max_tokens": 0, "return_tokens_as_token_ids": True, "return_token_ids": False
}  # fmt: skip


@EACH_MODEL
async def test_of_a_prompt_in_chunks_beside_others_they_are_those_of_a_single_process(
    variant: str, checkpoint: Checkpoint
) -> None:
    directory, model = load(variant, checkpoint)
    asked = prompts(6, 5, 200, seed=33)
    with System(directory, "--prefill-max-batch-tokens", "32").start() as system:
        plain = [choice(system.url, prompt, logprobs=None) for prompt in asked]
        scored = [choice(system.url, prompt, **ECHOED) for prompt in asked]
        both = [choice(system.url, prompt, **ECHOED | {"max_tokens": 9, "return_token_ids": True}) for prompt in asked]
        answers = await asyncio.gather(*plain, *scored, *both)
        system.until(system.all_blocks_free)
    for i, prompt in enumerate(asked):
        without, alone, whole = answers[i::6]
        check_prompt(model, prompt, alone, 5)
        assert len(alone["logprobs"]["tokens"]) == len(prompt) and alone["finish_reason"] == "length"
        check_prompt(model, prompt, whole, 5)
        assert whole["token_ids"] == without["token_ids"][:9] and whole["text"].startswith(alone["text"])
        told = {name: values[len(prompt) :] for name, values in whole["logprobs"].items()}
        check(model, prompt, {"logprobs": told, "token_ids": whole["token_ids"]}, 5)


@pytest.mark.parametrize("num_prefill", [0, 1, 2])
async def test_of_prompts_they_are_told_once_although_a_prefill_worker_dies(
    num_prefill: int, checkpoint: Checkpoint
) -> None:
    directory, model = checkpoint("qwen3-tied")
    asked = prompts(12, 300, 400, seed=34)
    flags = () if num_prefill else ("--kv-transport", "none")
    with HeldSystem(directory, "--prefill-max-batch-tokens", "16", *flags).start(prefill=num_prefill) as system:
        if num_prefill:
            system.holds.prompt_steps.set(60)  # one prompt takes up to 25, all of them 260
        tasks = [asyncio.create_task(choice(system.url, prompt, **ECHOED)) for prompt in asked]
        if num_prefill:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.to_thread(system.kill, "prefill-0")
            system.release()
        for prompt, answer in zip(asked, await asyncio.gather(*tasks), strict=True):
            assert len(answer["logprobs"]["tokens"]) == len(prompt)
            check_prompt(model, prompt, answer, 5)
        assert ("replayed" in system.log("router")) == bool(num_prefill)


async def test_names_and_offsets_say_where_in_the_text_a_token_is(checkpoint: Checkpoint) -> None:
    directory, _ = checkpoint("qwen3-tied")
    with System(directory).start() as system:
        answer = await choice(system.url, [5, 6, 7], max_tokens=60, temperature=1.0, seed=1)
    told, text = answer["logprobs"], answer["text"]
    ends = [*told["text_offset"][1:], len(text)]
    assert told["text_offset"][0] == 0 and ends == sorted(ends)
    named = [text[begin:end] for begin, end in zip(told["text_offset"], ends, strict=True)]
    whole = [(name, part) for name, part in zip(told["tokens"], named, strict=True) if not name.startswith("bytes:")]
    assert whole and all(part.endswith(name) or not part for name, part in whole)
