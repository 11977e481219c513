"""Rules with limits of the individual server; the API's document refers to these limits by name and defines each."""

from dataclasses import replace

from common.base.json_file import Json, JsonObject
from common.wire.values.fields import MAX_INT32
from router.base.json_rules import Rule, integer, string, wrong
from router.text.model_info import ModelInfo


def _limit(name: str) -> JsonObject:
    return {"$ref": f"#/components/schemas/{name}"}


TOKEN_ID, TOKEN_ID_TEXT = map(_limit, ("TokenId", "TokenIdText"))
MODEL_NAME = replace(string(), schema=_limit("ModelName"))
"""Rule for the name of a model; the caller compares the name with the served model."""
PRIORITY = replace(integer(-MAX_INT32, MAX_INT32), schema=_limit("Priority"))
"""Rule for the priority of a request; the caller checks the client's limit."""


def _num_kept(name: str, value: Json) -> int:
    number: int = integer(-1, MAX_INT32).checked(name, value)
    if number == 0:
        raise wrong(name, value, NUM_KEPT.wants)
    return number


NUM_KEPT = Rule(f"an integer from 1 to {MAX_INT32}, or -1", _limit("NumKept"), _num_kept)
"""Rule for prompt tokens to keep, or -1 for as many as fit."""


def limits_of(info: ModelInfo, min_priority: int) -> JsonObject:
    """Return the JSON schemas named by the rules, for a model and the most urgent priority allowed to clients."""
    return {
        "Priority": {"type": "integer", "minimum": min_priority, "maximum": MAX_INT32},
        "ModelName": {"const": info.name},
        "TokenId": {"type": "integer", "minimum": 0, "maximum": info.vocab_size - 1},
        "TokenIdText": {"type": "string", "pattern": f"^({decimals(info.vocab_size - 1)})$"},
        "NumKept": {"anyOf": [{"const": -1}, {"type": "integer", "minimum": 1, "maximum": info.max_model_len - 1}]},
    }


def decimals(high: int) -> str:
    """Return a regular expression for the decimal numbers from 0 to `high`."""
    digits = str(high)
    ways = [digits, "0"] if high else ["0"]
    ways += [f"[1-9][0-9]{{{length - 1}}}" for length in range(1, len(digits))]
    for index, digit in enumerate(digits):
        least = 0 if index else 1
        if int(digit) > least:
            ways.append(f"{digits[:index]}[{least}-{int(digit) - 1}][0-9]{{{len(digits) - index - 1}}}")
    return "|".join(ways)
