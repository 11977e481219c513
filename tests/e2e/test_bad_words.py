"""Words that a text must not have, of one token and of several, alone, in a batch and after a death."""

import asyncio
import re
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.e2e.client import complete_all
from tests.e2e.held_system import HeldSystem, killed_while_streaming
from tests.e2e.programs import ROOT
from tests.e2e.system import System
from tests.e2e.test_adjusted import wanted

pytestmark = pytest.mark.medium

LINES = ("ROMEO:\nBut soft", "The king is dead", "JULIET:\n", "First Citizen:\nBefore we proceed")
DEMO = ROOT / "deploy" / "demo_model"
MAX_TOKENS = 60
Law = Callable[[list[int], int, list[str]], str]


@pytest.fixture(scope="module")
def law() -> Law:
    """Greedy text of the demo model in a single process."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(DEMO).float().eval()
    return lambda prompt, max_tokens, words: wanted(DEMO, model, prompt, max_tokens, {"bad_words": words})


def words_of(text: str, tokenizer: Tokenizer) -> list[str]:
    """Some that it has, of different numbers of tokens, and a name with what follows it."""
    words = [*dict.fromkeys(re.findall(r"\w+[,.!?]?", text))]
    words.sort(key=lambda word: len(tokenizer.encode(f" {word}").ids))
    return [*words[1:4], *words[-4:], text[len(text) // 2 :][:9]]


async def test_texts_without_them_are_those_of_a_single_process(law: Law) -> None:
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    asked = [tokenizer.encode(line).ids for line in LINES]
    plain = [law(prompt, 40, []) for prompt in asked]
    words = [words_of(text, tokenizer) for text in plain]
    lengths = {len(tokenizer.encode(word).ids) for each in words for word in each}
    assert lengths >= {1, 2, 3}, lengths
    expected = [law(prompt, 40, each) for prompt, each in zip(asked, words, strict=True)]
    assert not {*expected} & {*plain}
    fields: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True}
    with System(DEMO, "--prefill-max-batch-tokens", "32").start() as system:

        async def one(prompt: list[int], bad_words: list[str]) -> str:
            [completion] = await complete_all(system.url, [prompt], bad_words=bad_words, **fields)
            assert completion.error is None
            return completion.text

        alone = [await one(prompt, each) for prompt, each in zip(asked, words, strict=True)]
        assert alone == expected
        together = await asyncio.gather(*map(one, [*asked, *asked], [*words, *[[]] * len(asked)]))
        assert together == [*expected, *plain]


@pytest.mark.parametrize("flags", [(), ("--kv-transport", "none")], ids=["", "local prompts"])
async def test_what_a_dead_worker_wrote_still_counts(flags: tuple[str, ...]) -> None:
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    asked = [tokenizer.encode(line).ids for line in LINES]
    fields: dict[str, Any] = {"max_tokens": MAX_TOKENS, "ignore_eos": True}
    with HeldSystem(DEMO, *flags).start(prefill=not flags, decode=2) as system:
        plain = [completion.text for completion in await complete_all(system.url, asked, **fields)]
        words = [*dict.fromkeys(word for text in plain for word in words_of(text, tokenizer))]
        calm = [completion.text for completion in await complete_all(system.url, asked, bad_words=words, **fields)]
        assert await killed_while_streaming(system, "decode-0", asked, MAX_TOKENS, bad_words=words) == calm
        assert "replayed" in system.log("router")
    assert not {*calm} & {*plain}
