"""The field `logit_bias`: values added to the logits of tokens."""

from dataclasses import dataclass

from common.base.errors import RequestError
from common.base.json_file import Json, JsonObject
from common.wire.values.fields import MAX_INT32
from router.base.json_rules import Number, shown, wrong
from router.text.server_rules import TOKEN_ID_TEXT

BIAS = Number(-100, 100)


@dataclass(frozen=True, slots=True)
class LogitBias:
    """Rule: an object of at most `max_tokens` numbers, by token id as a string; gives a dict by id."""

    max_tokens: int

    @property
    def wants(self) -> str:
        return f"an object of at most {self.max_tokens} token ids, each with {BIAS.wants}"

    @property
    def schema(self) -> JsonObject:
        return {
            "type": "object",
            "propertyNames": TOKEN_ID_TEXT,
            "additionalProperties": BIAS.schema,
            "maxProperties": self.max_tokens,
        }

    def checked(self, name: str, value: Json) -> dict[int, float]:
        if not isinstance(value, dict) or len(value) > self.max_tokens:
            raise wrong(name, value, self.wants)
        biases: dict[int, float] = {}
        for key, bias in value.items():
            token_id = _token_id(key)
            if token_id is None:
                raise RequestError(f"{name} has the key {shown(key)}: wants token ids, as strings", param=name)
            biases[token_id] = BIAS.checked(f"{name}.{token_id}", bias)
        return biases


def _token_id(key: str) -> int | None:
    """Return the id if written as Python does, so no token is given twice; else None."""
    if not (key.isascii() and key.isdigit() and len(key) <= 10) or str(int(key)) != key:
        return None
    token_id = int(key)
    return token_id if token_id <= MAX_INT32 else None
