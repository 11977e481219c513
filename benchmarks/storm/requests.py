"""Requests of a storm's clients; the right answer is the answer of the same system at rest."""

import json
import random
from dataclasses import dataclass, field
from typing import Any

VERSE = (
    "ROMEO:\nBut soft, what light through yonder window breaks? It is the east, and Juliet is the sun. "
    "Arise, fair sun, and kill the envious moon, who is already sick and pale with grief.\n"
)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer"},
        "wise": {"type": "boolean"},
    },
    "required": ["name", "age", "wise"],
    "additionalProperties": False,
}
MAX_TOKEN_ID = 2000
TOO_MANY_TOKENS = 1 << 18
JSON_TYPE = "application/json"


@dataclass(slots=True)
class Answer:
    """A client's reply, by choice."""

    texts: dict[int, str] = field(default_factory=dict)
    finish_reasons: dict[int, str] = field(default_factory=dict)
    usage: dict[str, int] = field(default_factory=dict)

    def add(self, choice: dict[str, Any]) -> None:
        """Add a chunk of a stream, or a whole text; raises ValueError for a choice that has ended."""
        index = choice["index"]
        if index in self.finish_reasons:
            raise ValueError(f"choice {index} goes on after it has ended")
        self.texts[index] = self.texts.get(index, "") + choice["text"]
        if choice["finish_reason"] is not None:
            self.finish_reasons[index] = choice["finish_reason"]


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """A request: the fields of its body except `stream`."""

    name: str
    fields: dict[str, Any]

    def body(self, *, stream: bool) -> bytes:
        options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        return json.dumps({**self.fields, **options}).encode()


@dataclass(frozen=True, slots=True)
class Refusable:
    """A wrong request, and the status of its refusal."""

    body: bytes
    status: int
    content_type: str = JSON_TYPE


REFUSABLE = (
    Refusable(b'{"prompt": "", "max_tokens": 4}', 400),
    Refusable(b'{"prompt": [], "max_tokens": 4}', 400),
    Refusable(b'{"prompt": "a", "max_tokens": 0}', 400),
    Refusable(b'{"prompt": [1, -1]}', 400),
    Refusable(b'{"prompt": "a", "temperature": "hot"}', 400),
    Refusable(b'{"prompt": "a", "model": "another"}', 404),
    Refusable(b'{"prompt": "a"', 400),
    Refusable(b'{"prompt": "a"}', 415, "text/plain"),
    Refusable(json.dumps({"prompt": [1] * TOO_MANY_TOKENS}).encode(), 400),
)

HOSTILE = "start: e\ne: e e | e e e | /[a-z]/ | /[ ,.;\\n]/"
"""A grammar under which each token takes longer than the last."""
DEAD_END = "grammar_dead_end"


def make_hostile(seed: int) -> Case:
    """Return a request ended by the cost of a hostile grammar, or earlier by the client."""
    fields = {"temperature": 1, "seed": seed, "n": 4, "max_tokens": 200, "ignore_eos": True}
    return Case("hostile", {"prompt": "x", "structured_outputs": {"grammar": HOSTILE}, **fields})


def make_unread(seed: int) -> Case:
    """Return a request for megabytes of answer, left unread by the client."""
    fields = {"temperature": 1, "seed": seed, "n": 8, "max_tokens": 500, "ignore_eos": True, "logprobs": 5}
    return Case("unread", {"prompt": VERSE, "user": "unread", **fields})


def make_flood(case: Case) -> Case:
    """Return an equal request, by the user who floods the system."""
    return Case("flood", {**case.fields, "user": "flood"})


def make_cases(seed: int, max_model_len: int) -> list[Case]:
    """Make a mix of lengths and kinds; all are greedy or seeded, so each has a single right answer."""
    rng = random.Random(seed)
    longest = max_model_len // 2

    def ids(low: int, high: int) -> list[int]:
        return [rng.randrange(1, MAX_TOKEN_ID) for _ in range(rng.randint(low, high))]

    def case(name: str, prompt: Any, low: int, high: int, **fields: Any) -> Case:
        fields = {"temperature": 0, "ignore_eos": True, "max_tokens": rng.randint(low, high), **fields}
        return Case(name, {"prompt": prompt, **fields})

    cases = [case("short", ids(1, 40), 1, 40) for _ in range(6)]
    cases += [case("text", VERSE[: rng.randint(5, len(VERSE))], 20, 60, user=f"user-{n}") for n in range(3)]
    cases += [case("long output", ids(20, 100), 150, 300) for _ in range(3)]
    cases += [case("chunked prompt", ids(longest // 2, longest), 5, 20) for _ in range(4)]
    cases += [case("three choices", ids(10, 60), 20, 40, n=3) for _ in range(2)]
    cases += [case("three prompts", [ids(10, 60), ids(10, 60), ids(200, 300)], 20, 40) for _ in range(2)]
    cases += [case("stop strings", VERSE, 200, 200, stop=["the", "\n"], ignore_eos=False)]
    cases += [case("a late stop", VERSE[:40], 200, 200, stop=[".\n\n"], ignore_eos=False)]
    cases += [case("seeded", ids(10, 60), 40, 80, temperature=0.8, top_p=0.9, seed=n, n=2) for n in range(2)]
    cases += [case("regex", ids(10, 60), 20, 60, structured_outputs={"regex": "([a-z]{1,9}[ ,.])*"}, n=2)]
    cases += [case("schema", VERSE, 60, 60, structured_outputs={"json": SCHEMA}) for _ in range(2)]
    cases += [case("urgent", ids(100, 200), 5, 20, priority=-1)]
    return cases
