"""Grammar of a call's parameters between tags, as Qwen3.5 writes them."""

import json
from typing import NamedTuple

from common.base.json_file import Json, JsonObject
from router.grammar.dialect import Dialect
from router.text.formats.typed_values import resolved, types_of
from router.text.formats.xml_calls import PARAMETER, PARAMETER_END

TEXT = r"/([^<]|<[^\/])*/"
"""A value of text: ends before any end tag."""
KEY = r"/[^>\n]{1,64}/"
HELD = {"type", "enum", "const", "minLength", "maxLength", "title", "description", "default", "examples", "$ref"}
"""Keywords of text that a value is held to, or that ask for nothing."""
END = f"\n{PARAMETER_END}\n"


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
        free = f"{json.dumps(PARAMETER)} {KEY} {_quoted('>', '')} {TEXT} {json.dumps(END)}"
        return Parameters([{"lark_grammar": f"start: ({free})*"}], [])
    required = schema.get("required") if isinstance(schema.get("required"), list) else []
    shared = {key: schema[key] for key in ("$defs", "definitions", "x-guidance") if key in schema}
    pieces, values, dropped = [], [], []
    for number, (key, each) in enumerate(properties.items()):
        if types_of(each, schema) == {"string"}:
            value, lost = _text(resolved(each, schema))
            dropped += [f"{key}.{keyword}" for keyword in lost]
        else:
            value = f"@{name}_{number}"
            of_value = shared | each if isinstance(each, dict) else each
            values.append({"name": f"{name}_{number}", "json_schema": of_value})
        piece = f"{_quoted(PARAMETER, f'{key}>')} {value} {json.dumps(END)}"
        pieces.append(piece if key in required else f"({piece})?")
    return Parameters([{"lark_grammar": f"start: {' '.join(pieces)}"}, *values], dropped)


def _quoted(before: str, behind: str) -> str:
    return json.dumps(f"{before}{behind}\n", ensure_ascii=False)


def _text(schema: Json) -> tuple[str, list[str]]:
    """Return the grammar of a value that is text, and the keywords that it is not held to."""
    if not isinstance(schema, dict):
        return TEXT, []
    choices = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(choices, list) and choices:
        return f"({' | '.join(json.dumps(each, ensure_ascii=False) for each in choices)})", []
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    text = f"/[^<]{{{least},{'' if most is None else most}}}/" if least or most is not None else TEXT
    return text, sorted(set(schema) - HELD)
