"""What the tests ask of a system, and what a single process answers."""

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import aiohttp
import torch
from tokenizers import Tokenizer

TIMEOUT = aiohttp.ClientTimeout(total=200)
_TEXTS = WeakKeyDictionary[Any, dict[Any, str]]()
"""By model, its greedy texts."""


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

    def __init__(self, directory: Path, model: Any, cache: Callable[[], Any] | None = None) -> None:
        self.model, self.cache = model, cache or (lambda: None)
        self.tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        self.eos = model.config.eos_token_id
        self._known: dict[Any, str] = {} if cache else _TEXTS.setdefault(model, {})

    def text(self, prompt: list[int], max_tokens: int, *, ignore_eos: bool = False, guess: Sequence[int] = ()) -> str:
        """Return the text behind a prompt; each text is computed once.

        Args:
            guess: ids that the text may begin with. Those that are right are found in one pass, not one by one.
        """
        key = (tuple(prompt), max_tokens, ignore_eos)
        if key not in self._known:
            self._known[key] = self._text(prompt, max_tokens, ignore_eos, guess)
        return self._known[key]

    def texts(
        self, prompts: list[list[int]], guesses: list[Completion], max_tokens: int, *, ignore_eos: bool = True
    ) -> list[str]:
        """Return the texts behind prompts, with the ids of streams as guesses."""
        pairs = zip(prompts, guesses, strict=True)
        return [self.text(p, max_tokens, ignore_eos=ignore_eos, guess=guess.ids) for p, guess in pairs]

    @torch.inference_mode()
    def _text(self, prompt: list[int], max_tokens: int, ignore_eos: bool, guess: Sequence[int]) -> str:
        ids, past, num_cached = [*prompt, *self._right(prompt, guess[:max_tokens])], self.cache(), 0
        if self.eos in ids[len(prompt) :] and not ignore_eos:
            ids = ids[: ids.index(self.eos, len(prompt)) + 1]
        while len(ids) < len(prompt) + max_tokens and (ids[-1] != self.eos or ignore_eos or len(ids) == len(prompt)):
            out = self.model(torch.tensor([ids[num_cached:]]), past_key_values=past, use_cache=True)
            past, num_cached = out.past_key_values, len(ids)
            ids.append(int(out.logits[0, -1].argmax()))
        return str(self.tokenizer.decode(ids[len(prompt) :], skip_special_tokens=True))

    def _right(self, prompt: list[int], guess: Sequence[int]) -> list[int]:
        """Return the ids of a guess before the first wrong one."""
        if not guess:
            return []
        out = self.model(torch.tensor([[*prompt, *guess]]), past_key_values=self.cache(), use_cache=True)
        best = out.logits[0, len(prompt) - 1 : -1].argmax(-1).tolist()
        return [token for token, _ in takewhile(lambda pair: pair[0] == pair[1], zip(guess, best, strict=True))]

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
