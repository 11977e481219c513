"""The field `logit_bias`: values added to the logits of tokens."""

from common.base.errors import RequestError
from common.base.json_file import Json
from common.wire.values.fields import MAX_INT32
from router.base.json_rules import Rule, number, shown, wrong
from router.text.server_rules import TOKEN_ID_TEXT

BIAS = number(-100, 100)


def logit_bias(max_tokens: int) -> Rule:
    """Make a rule: an object of at most `max_tokens` numbers, by token id as a string; gives a dict by id."""
    wants = f"an object of at most {max_tokens} token ids, each with {BIAS.wants}"
    schema = {
        "type": "object",
        "propertyNames": TOKEN_ID_TEXT,
        "additionalProperties": BIAS.schema,
        "maxProperties": max_tokens,
    }

    def checked(name: str, value: Json) -> dict[int, float]:
        if not isinstance(value, dict) or len(value) > max_tokens:
            raise wrong(name, value, wants)
        biases: dict[int, float] = {}
        for key, bias in value.items():
            token_id = _token_id(key)
            if token_id is None:
                raise RequestError(f"{name} has the key {shown(key)}: wants token ids, as strings", param=name)
            biases[token_id] = BIAS.checked(f"{name}.{token_id}", bias)
        return biases

    return Rule(wants, schema, checked)


def _token_id(key: str) -> int | None:
    """Return the id if written as Python does, so no token is given twice; else None."""
    if not (key.isascii() and key.isdigit() and len(key) <= 10) or str(int(key)) != key:
        return None
    token_id = int(key)
    return token_id if token_id <= MAX_INT32 else None
