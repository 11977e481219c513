"""Request bodies hard on a router: long, deep, many-valued, or many."""

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

import tokenizers

ROOT = Path(__file__).resolve().parents[1]
MB = 1_000_000


@dataclass(frozen=True, slots=True)
class Load:
    """Clients that repeat a few bodies, each sending the next after an answer."""

    num_clients: int
    make: Callable[[tokenizers.Tokenizer], list[bytes]]


def prose(num_chars: int) -> str:
    """Return the project's own pages, repeated: English, code and tables."""
    pages = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").rglob("*.md"))]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    return "".join(islice(cycle(text), num_chars))


def text_of(tokenizer: tokenizers.Tokenizer, num_tokens: int) -> str:
    """Return a text of `num_tokens` tokens."""
    text = prose(8 * num_tokens)
    return text[: tokenizer.encode(text, add_special_tokens=False).offsets[num_tokens - 1][1]]


def new_texts(tokenizer: tokenizers.Tokenizer, num_tokens: int, num_texts: int) -> Iterator[str]:
    """Yield texts of about `num_tokens` tokens without long common parts: equal lines in different orders."""
    lines = text_of(tokenizer, num_tokens).splitlines(keepends=True)
    order = random.Random(0)
    for _ in range(num_texts):
        order.shuffle(lines)
        yield "".join(lines)


def body(prompt: object, **fields: object) -> bytes:
    return json.dumps({"prompt": prompt, "max_tokens": 1, "ignore_eos": True, **fields}).encode()


def _one(make: Callable[[], bytes]) -> Callable[[tokenizers.Tokenizer], list[bytes]]:
    return lambda _: [make()]


def _new(num_tokens: int, num_texts: int) -> Callable[[tokenizers.Tokenizer], list[bytes]]:
    return lambda tokenizer: list(map(body, new_texts(tokenizer, num_tokens, num_texts)))


def _new_ends(num_tokens: int, num_texts: int) -> Callable[[tokenizers.Tokenizer], list[bytes]]:
    def make(tokenizer: tokenizers.Tokenizer) -> list[bytes]:
        text = text_of(tokenizer, num_tokens)
        return [body(f"{text} And what of number {number}?") for number in range(num_texts)]

    return make


def _repeated(before: str, piece: str, num_bytes: int, after: str) -> bytes:
    return (before + piece * (num_bytes // len(piece)) + after).encode()


LOADS = {
    "nothing": Load(0, lambda _: []),
    "texts of 1 MB": Load(4, _one(lambda: body(prose(MB)))),
    "words of 1 MB": Load(4, _one(lambda: body("a" * MB))),
    "digits of 1 MB": Load(4, _one(lambda: body("1" * MB))),
    "texts of 15 MB": Load(6, _one(lambda: body(prose(15 * MB)[: 145 * MB // 10]))),
    "ids of 15 MB": Load(6, _one(lambda: _repeated('{"prompt":[1', ",23456", 15 * MB, "]}"))),
    "empty lists of 15 MB": Load(6, _one(lambda: _repeated('{"prompt":[[]', ",[]", 15 * MB, "]}"))),
    "keys of 15 MB": Load(6, _one(lambda: json.dumps({str(i): 1 for i in range(1_200_000)}).encode())),
    "depth of 15 MB": Load(6, _one(lambda: b'{"prompt":' + b"[" * (15 * MB))),
    "lists of 60 kB": Load(4, _one(lambda: _repeated('{"prompt":[[]', ",[]", 60_000, "]}"))),
    "128 tiny prompts, n = 15": Load(1, _one(lambda: body(["a"] * 128, n=15))),
    "texts of 1,024 tokens": Load(32, _new(1024, 8192)),
    "texts of 16,384 tokens": Load(1, _new(16_384, 512)),
    "a text of 16,384 tokens, new ends": Load(1, _new_ends(16_384, 512)),
}


def names(text: str) -> Sequence[str]:
    """Return load names from a text separated by semicolons; raises ValueError for an unknown name."""
    chosen = [name.strip() for name in text.split(";")]
    unknown = [name for name in chosen if name not in LOADS]
    if unknown:
        raise ValueError(f"{unknown[0]!r}: one of {'; '.join(LOADS)}")
    return chosen
