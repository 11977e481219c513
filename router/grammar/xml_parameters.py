"""Grammar of a call's parameters between tags, as Qwen3.5 writes them."""

import json
import re
from typing import NamedTuple

from common.base.json_file import Json, JsonObject
from router.grammar.dialect import Dialect, escaped
from router.text.formats.typed_values import resolved, types_of
from router.text.formats.xml_calls import PARAMETER, PARAMETER_END

KEY = r"/[^>\n]{1,64}/"
HELD = {"type", "enum", "const", "minLength", "maxLength", "title", "description", "default", "examples", "$ref"}
"""Keywords of text that a value is held to, or that ask for nothing."""
END = json.dumps(f"\n{PARAMETER_END}\n")


class Parameters(NamedTuple):
    """Grammars for llguidance: first the parameters in the schema's order, then the values that are JSON."""

    grammars: list[JsonObject]
    dropped: list[str]  # keywords that values are not held to


def xml_parameters(name: str, schema: Json, _: Dialect) -> Parameters:
    """Return the grammar of the parameters of a tool, with value grammars named by `name`.

    Parameters of a schema without properties are free. Optional parameters may be left out.
    """
    properties = schema.get("properties") if isinstance(schema, dict) else None
    if not isinstance(properties, dict) or not properties:
        free = f"{json.dumps(PARAMETER)} {KEY} {_quoted('>')} text"
        return Parameters([{"lark_grammar": f"start: ({free})*\n{_text('text', 0, None)}"}], [])
    required = schema.get("required") if isinstance(schema.get("required"), list) else []
    shared = {key: schema[key] for key in ("$defs", "definitions", "x-guidance") if key in schema}
    pieces, values, dropped = [], [], []
    rules: list[str] = []
    for number, (key, each) in enumerate(properties.items()):
        if types_of(each, schema) == {"string"}:
            value, rule, lost = _text_value(f"text{number}", resolved(each, schema))
            rules.append(rule)
            dropped += [f"{key}.{keyword}" for keyword in lost]
        else:
            value = f"@{name}_{number} {END}"
            of_value = shared | each if isinstance(each, dict) else each
            values.append({"name": f"{name}_{number}", "json_schema": of_value})
        piece = f"{_quoted(f'{PARAMETER}{key}>')} {value}"
        pieces.append(piece if key in required else f"({piece})?")
    start = f"start: {' '.join(pieces)}\n{''.join(rules)}"
    return Parameters([{"lark_grammar": start}, *values], dropped)


def _quoted(line: str) -> str:
    return json.dumps(f"{line}\n", ensure_ascii=False)


def _text_value(rule: str, schema: Json) -> tuple[str, str, list[str]]:
    """Return the expression of a text with its end tag, the rules that it needs, and the keywords it is not held to."""
    if not isinstance(schema, dict):
        return rule, _text(rule, 0, None), []
    choices = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(choices, list) and choices:
        return f"({' | '.join(json.dumps(each, ensure_ascii=False) for each in choices)}) {END}", "", []
    return rule, _text(rule, schema.get("minLength", 0), schema.get("maxLength")), sorted(set(schema) - HELD)


def _text(rule: str, least: int, most: int | None) -> str:
    """Return the rules of a text of so many characters with its end tag, whose first occurrence ends the text.

    Only a `suffix` ends a text that may hold the tag's characters, because other terminals match as much as they can.
    An empty text may have a single line break between its tags.
    """
    lines = f"((.|\\n){{{least},{'' if most is None else most}}}\\n){'' if least else '?'}"
    has_tag = f"/(.|\\n)*{escaped(re.escape(PARAMETER_END))}(.|\\n)*/"
    return (
        f'{rule}: {rule}_before "\\n"\n'
        f"{rule}_before[suffix={json.dumps(PARAMETER_END)}]: {rule.upper()}\n"
        f"{rule.upper()}: /{lines}/ & ~{has_tag}\n"
    )
