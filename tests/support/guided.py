"""What tests of grammars share: the demo model, schemas at random, and whether a text is valid by one."""

import json
import random
import string
from collections.abc import Collection, Sequence
from mmap import mmap
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np

from common.grammar.follower import Outcome
from common.grammar.grammars import Grammars
from common.grammar.records import Kind, Masks, mask_bytes_of
from common.grammar.text_matcher import TextMatcher

DEMO_MODEL = Path(__file__).parents[2] / "deploy" / "demo_model"
LETTERS = string.ascii_letters + 'äßé你好привет🎉"\\/\n\t\u0007 '


class TextFollower:
    """Follows one text in this process."""

    def __init__(self, grammar: str, stop_token_ids: Collection[int] = ()) -> None:
        self.grammar, self.stop_token_ids = grammar, stop_token_ids
        self.text: TextMatcher | None = None

    def follow(self, grammars: Grammars, token_ids: Sequence[int]) -> Outcome:
        if self.text is None:
            self.text = TextMatcher(grammars, grammars.compile(self.grammar), self.stop_token_ids)
        masks = Masks(mmap(-1, mask_bytes_of(grammars.vocab)), mask_bytes_of(grammars.vocab))
        kind, told = self.text.follow(token_ids, masks, 0)
        if kind is Kind.MASK:
            return Outcome(np.frombuffer(masks.read(0), np.int32))
        return Outcome(is_over=kind is Kind.OVER, problem=told)


def random_schema(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    """Of objects, arrays, unions and scalars, of which each has an end."""
    makers = [_string, _enum, _number, _constant]
    if depth:
        makers += [_object, _object, _array, _tuple, _union]
    return rng.choice(makers)(rng, depth - 1)


def random_root(rng: random.Random) -> dict[str, Any]:
    """An object with definitions that are referred to, one of them by itself."""
    names = [f"def{i}" for i in range(rng.randint(1, 3))]
    node = _object(rng, 1)
    node["properties"]["next"] = {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}
    definitions = {name: random_schema(rng, 1) for name in names} | {"node": node}
    root = _object(rng, 2)
    for i in range(rng.randint(1, 3)):
        root["properties"][f"ref{i}"] = {"$ref": f"#/$defs/{rng.choice([*names, 'node'])}"}
    root["required"] = sorted({*root["required"], *rng.sample(sorted(root["properties"]), 1)})
    return root | {"$defs": definitions}


def is_valid(text: str, schema: Any) -> bool:
    """Whether the text is JSON by the schema."""
    return bool(jsonschema_rs.is_valid(schema, json.loads(text)))


def _name(rng: random.Random) -> str:
    return "".join(rng.choice(LETTERS) for _ in range(rng.randint(1, 6)))


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    properties = {_name(rng): random_schema(rng, max(0, depth)) for _ in range(rng.randint(0, 4))}
    required = [name for name in properties if rng.random() < 0.6]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(0, 2)
    return {"type": "array", "items": random_schema(rng, depth), "minItems": low, "maxItems": low + rng.randint(0, 2)}


def _tuple(rng: random.Random, depth: int) -> dict[str, Any]:
    items = [random_schema(rng, depth) for _ in range(rng.randint(1, 3))]
    return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}


def _union(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [random_schema(rng, depth) for _ in range(rng.randint(2, 3))]}


def _string(rng: random.Random, depth: int) -> dict[str, Any]:
    bounded = {"type": "string", "minLength": rng.randint(0, 3), "maxLength": rng.randint(3, 9)}
    patterned = {
        "type": "string",
        "pattern": rng.choice(["^[a-f]{2,5}$", "^(ab|ü){1,4}x?$|^z{1,9}$", r"^\d{3}-\w{1,3}$"]),
    }
    formatted = {"type": "string", "format": rng.choice(["date", "uuid", "ipv4"])}
    return rng.choice([bounded, bounded, patterned, formatted])


def _enum(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"enum": rng.sample(["a", "ab", "ü", "你好", "\n", 1, -2.5, None, True, False, [1, "x"], {"k": "v"}], 4)}


def _constant(rng: random.Random, depth: int) -> dict[str, Any]:
    return rng.choice([{"const": _name(rng)}, {"const": rng.randint(-99, 99)}, {"type": "boolean"}, {"type": "null"}])


def _number(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(-1000, 1000)
    bounds = {"minimum": low, "maximum": low + rng.randint(0, 5000)}
    return rng.choice([{"type": "integer", **bounds}, {"type": "integer", "exclusiveMinimum": low, "maximum": low + 9}])
