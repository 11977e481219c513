"""What the tests ask of a system, and what a single process answers."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import torch
from tokenizers import Tokenizer

TIMEOUT = aiohttp.ClientTimeout(total=200)


@dataclass
class Completion:
    """A finished stream."""

    text: str = ""
    finish_reason: str | None = None
    usage: dict[str, int] = field(default_factory=dict)
    error: Any = None
    ids: list[int] = field(default_factory=list)  # if asked for by `return_token_ids`

    @property
    def num_tokens(self) -> int:
        """That have arrived; several may come in one event."""
        return self.usage.get("completion_tokens", 0)


async def complete(
    session: aiohttp.ClientSession, url: str, prompt: str | list[int], into: Completion | None = None, **fields: Any
) -> Completion:
    """Stream one completion to its end; `into` shows it growing."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": prompt, "temperature": 0, "stream": True, "stream_options": options, **fields}
    completion = into or Completion()
    async with session.post(f"{url}/v1/completions", json=body, timeout=TIMEOUT) as response:
        if response.status != 200:
            completion.error = await response.json()
            return completion
        async for line in response.content:
            data = line.decode().removeprefix("data: ").strip()
            if data and data != "[DONE]":
                add(completion, json.loads(data))
    return completion


def add(completion: Completion, chunk: dict[str, Any]) -> None:
    if "error" in chunk:
        completion.error = chunk["error"]
    for choice in chunk.get("choices", []):
        completion.text += choice["text"]
        completion.ids += choice.get("token_ids") or []
        completion.finish_reason = choice["finish_reason"] or completion.finish_reason
    completion.usage = chunk.get("usage") or completion.usage


async def complete_all(
    url: str, prompts: list[list[int]], into: list[Completion] | None = None, **fields: Any
) -> list[Completion]:
    """All prompts at once."""
    targets = into if into is not None else [Completion() for _ in prompts]
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        streams = (complete(session, url, p, target, **fields) for p, target in zip(prompts, targets, strict=True))
        return await asyncio.gather(*streams)


class Reference:
    """Greedy text of a single process, by transformers.

    Args:
        cache: makes the cache of a text; None for that of transformers.
    """

    def __init__(self, directory: Path, model: Any, cache: Callable[[], Any] = lambda: None) -> None:
        self.model, self.cache = model, cache
        self.tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        self.eos = model.config.eos_token_id

    def text(self, prompt: list[int], max_tokens: int, *, ignore_eos: bool = False) -> str:
        ids, past, num_cached = list(prompt), self.cache(), 0
        with torch.inference_mode():
            for _ in range(max_tokens):
                out = self.model(torch.tensor([ids[num_cached:]]), past_key_values=past, use_cache=True)
                past, num_cached = out.past_key_values, len(ids)
                ids.append(int(out.logits[0, -1].argmax()))
                if ids[-1] == self.eos and not ignore_eos:
                    break
        return str(self.tokenizer.decode(ids[len(prompt) :], skip_special_tokens=True))

    @torch.inference_mode()
    def behind(self, prompt: list[int], ids: list[int]) -> float:
        """How far the logit of any of `ids`, which continue a prompt, is below the best in its place."""
        out = self.model(torch.tensor([[*prompt, *ids]]), past_key_values=self.cache(), use_cache=True)
        logits = out.logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(ids)[:, None])[:, 0]
        return float((logits.amax(-1) - chosen).max())


def prompts(count: int, low: int, high: int, seed: int = 0) -> list[list[int]]:
    """Random prompts of `low` to `high` tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(low, high + 1, (count,), generator=generator).tolist()
    return [torch.randint(2, 290, (length,), generator=generator).tolist() for length in lengths]
