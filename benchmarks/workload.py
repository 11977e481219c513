"""What is sent and when: prompts of exact lengths and arrival times, all from one seed."""

import json
import random
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any


def numbers(text: str) -> list[int]:
    """Of a list with commas, as an option."""
    return [int(part) for part in text.split(",")]


@dataclass(frozen=True, slots=True)
class Lengths:
    """Prompt and output lengths in tokens, each drawn evenly from an inclusive range."""

    input_range: tuple[int, int]
    output_range: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Stream:
    """Requests of fixed lengths, `rate` a second on average."""

    rate: float
    lengths: Lengths

    @staticmethod
    def parse(text: str) -> "Stream":
        """From `20:128/8`, 20 a second of 128 prompt and 8 output tokens; raises ValueError for anything else."""
        try:
            rate, _, lengths = text.partition(":")
            num_inputs, num_outputs = map(int, lengths.split("/"))
            stream = Stream(float(rate), Lengths((num_inputs, num_inputs), (num_outputs, num_outputs)))
        except ValueError:
            raise ValueError(f"{text!r}: a rate and two lengths, for example 20:128/8") from None
        if not 0 < stream.rate < 1e6 or min(num_inputs, num_outputs) < 1:
            raise ValueError(f"{text!r}: the rate above 0, the lengths at least 1")
        return stream

    def __str__(self) -> str:
        return f"{self.rate:g} req/s of {self.lengths.input_range[0]}/{self.lengths.output_range[0]}"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request to come. `content` is token ids, or a text whose length the server counts."""

    content: list[int] | str
    max_tokens: int

    @property
    def num_tokens(self) -> int | None:
        return None if isinstance(self.content, str) else len(self.content)

    def body(self, model: str) -> bytes:
        """The request as JSON, made before the clock starts."""
        request = {
            "model": model,
            "prompt": self.content,
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return json.dumps(request, separators=(",", ":")).encode()


def random_prompts(num_prompts: int, lengths: Lengths, vocab_size: int, seed: str) -> list[Prompt]:
    """Random token ids: no two prompts share a prefix that a cache could serve."""
    rng = random.Random(seed)
    return [
        Prompt(rng.choices(range(vocab_size), k=rng.randint(*lengths.input_range)), rng.randint(*lengths.output_range))
        for _ in range(num_prompts)
    ]


def file_prompts(path: Path, num_prompts: int, lengths: Lengths, seed: str) -> list[Prompt]:
    """Texts from a file, one a line, or JSON objects with `prompt` and perhaps `max_tokens`; repeated if too few."""
    rng = random.Random(seed)
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not lines:
        raise ValueError(f"{path} holds no prompt")
    prompts = []
    for number in range(num_prompts):
        line = lines[number % len(lines)]
        drawn = rng.randint(*lengths.output_range)
        entry: dict[str, Any] = json.loads(line) if line.startswith("{") else {"prompt": line}
        prompts.append(Prompt(entry["prompt"], entry.get("max_tokens", drawn)))
    return prompts


def poisson_arrivals(num_prompts: int, rate: float, seed: str) -> list[float]:
    """Seconds from the start at which each request is sent, `rate` a second on average."""
    rng = random.Random(seed)
    return list(accumulate(rng.expovariate(rate) for _ in range(num_prompts)))
