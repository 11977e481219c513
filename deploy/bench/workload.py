"""Prompts of exact lengths and arrival times, all from a seed."""

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

from common.base.json_file import JsonObject

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
ENDLESS = {"type": "array", "items": PERSON, "minItems": 1_000_000}
"""A JSON schema whose texts are as long as wanted."""
SIGMA = 1.5
"""Standard deviation of log(length): 1 % exceed ten times the mean, half are below a third."""


def numbers(text: str) -> list[int]:
    """Parse a comma-separated option."""
    return [int(part) for part in text.split(",")]


@dataclass(frozen=True, slots=True)
class Even:
    """A uniform distribution over an inclusive range."""

    low: int
    high: int

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.low, self.high)

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"


@dataclass(frozen=True, slots=True)
class HeavyTailed:
    """Log-normal about a mean, many short and few very long; none above `longest`."""

    mean: int
    longest: int = 32_000

    def draw(self, rng: random.Random) -> int:
        length = rng.lognormvariate(math.log(self.mean) - SIGMA**2 / 2, SIGMA)
        return min(max(round(length), 1), self.longest)

    def __str__(self) -> str:
        return f"~{self.mean}"


Draw = Even | HeavyTailed
"""A distribution of lengths in tokens; `str()` describes the distribution."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Distributions of prompt and output lengths."""

    inputs: Draw
    outputs: Draw

    @staticmethod
    def fixed(num_inputs: int, num_outputs: int) -> "Lengths":
        return Lengths(Even(num_inputs, num_inputs), Even(num_outputs, num_outputs))


@dataclass(frozen=True, slots=True)
class Stream:
    """Requests of fixed lengths, `rate` a second on average."""

    rate: float
    lengths: Lengths

    @staticmethod
    def parse(text: str) -> "Stream":
        """Parse `20:128/8`: 20 a second of 128 prompt and 8 output tokens; raises ValueError for anything else."""
        try:
            rate, _, lengths = text.partition(":")
            num_inputs, num_outputs = map(int, lengths.split("/"))
            stream = Stream(float(rate), Lengths.fixed(num_inputs, num_outputs))
        except ValueError:
            raise ValueError(f"{text!r}: a rate and two lengths, for example 20:128/8") from None
        if not 0 < stream.rate < 1e6 or min(num_inputs, num_outputs) < 1:
            raise ValueError(f"{text!r}: the rate above 0, the lengths at least 1")
        return stream

    def __str__(self) -> str:
        return f"{self.rate:g} req/s of {self.lengths.inputs}/{self.lengths.outputs}"


@dataclass(frozen=True, slots=True)
class Sampling:
    """Choice of tokens; `str()` describes it, and is empty for the likeliest token."""

    temperature: float = 0.0
    top_p: float = 1.0

    def __str__(self) -> str:
        top_p = f", top-p {self.top_p:g}" if self.top_p < 1 else ""
        return f"temperature {self.temperature:g}{top_p}" if self.temperature else ""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request to come. `content` is token ids, or a text."""

    content: list[int] | str
    max_tokens: int
    sampling: Sampling = Sampling()
    is_structured: bool = False  # the reply is JSON by `ENDLESS`
    returns_ids: bool = False  # the reply's token ids come back
    num_text_tokens: int | None = None  # of a text; None if only the server can tell

    @property
    def num_tokens(self) -> int | None:
        return self.num_text_tokens if isinstance(self.content, str) else len(self.content)

    @property
    def token_ids(self) -> list[int]:
        """The prompt's token ids; raises TypeError for a text."""
        if isinstance(self.content, str):
            raise TypeError("a text has no token ids of its own")
        return self.content

    def after(self, token_ids: list[int]) -> "Prompt":
        """Return the prompt with `token_ids` in front.

        Raises TypeError for a text, because a token could straddle the seam.
        """
        return replace(self, content=token_ids + self.token_ids)

    def body(self, model: str) -> bytes:
        """Return the request as JSON, made before the clock starts."""
        request: JsonObject = {
            "model": model,
            "prompt": self.content,
            "max_tokens": self.max_tokens,
            "temperature": self.sampling.temperature,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.sampling.top_p < 1:
            request["top_p"] = self.sampling.top_p
        if self.is_structured:
            schema: JsonObject = {"name": "people", "schema": ENDLESS, "strict": True}
            request["response_format"] = {"type": "json_schema", "json_schema": schema}
        if self.returns_ids:
            request["return_token_ids"] = True
        return json.dumps(request, separators=(",", ":")).encode()


def random_prompts(num_prompts: int, lengths: Lengths, vocabulary: Sequence[int], seed: str) -> list[Prompt]:
    """Return prompts of random token ids: no two share a prefix that a cache could serve."""
    rng = random.Random(seed)
    return [
        Prompt(rng.choices(vocabulary, k=lengths.inputs.draw(rng)), lengths.outputs.draw(rng))
        for _ in range(num_prompts)
    ]


def structured(prompts: Sequence[Prompt], share: float) -> list[Prompt]:
    """Return the prompts, with an evenly spread `share` to be answered in JSON."""
    return [
        replace(prompt, is_structured=int((number + 1) * share) > int(number * share))
        for number, prompt in enumerate(prompts)
    ]


def file_prompts(path: Path, num_prompts: int, lengths: Lengths, seed: str) -> list[Prompt]:
    """Read prompts from a file, repeating lines if too few.

    A line is a text, or a JSON object with `prompt` and perhaps `max_tokens`. Raises ValueError for an empty file.
    """
    rng = random.Random(seed)
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not lines:
        raise ValueError(f"{path} holds no prompt")
    prompts = []
    for number in range(num_prompts):
        line = lines[number % len(lines)]
        drawn = lengths.outputs.draw(rng)
        entry: JsonObject = json.loads(line) if line.startswith("{") else {"prompt": line}
        prompts.append(Prompt(entry["prompt"], entry.get("max_tokens", drawn)))
    return prompts


def arrivals_at(num_prompts: int, rate: float, seed: str, burstiness: float = 1.0) -> list[float]:
    """Return each request's time in seconds from the start, `rate` a second on average.

    Times between arrivals follow a gamma distribution of shape `burstiness`; 1 is Poisson, less comes in bursts.
    """
    rng = random.Random(seed)
    if burstiness == 1.0:
        return list(accumulate(rng.expovariate(rate) for _ in range(num_prompts)))
    return list(accumulate(rng.gammavariate(burstiness, 1 / (rate * burstiness)) for _ in range(num_prompts)))
