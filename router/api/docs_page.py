"""HTML page at `/docs`, made of an OpenAPI document, without scripts or external files."""

import json
import re
from collections.abc import Iterator
from html import escape

from common.base.json_file import JsonObject

STYLE = (
    ":root{color-scheme:light dark}body{font:16px/1.5 sans-serif;max-width:60em;margin:2em auto;padding:0 1em}"
    "table{border-collapse:collapse;table-layout:fixed;width:100%}td:first-child{width:40%}"
    "td{padding:.2em 1em .2em 0;vertical-align:top;border-top:1px solid #ccc;overflow-wrap:anywhere}"
)
CODE = re.compile("`([^`]*)`")


def page(document: JsonObject) -> str:
    """Return the HTML page of an OpenAPI document."""
    title = f"{escape(document['info']['title'])} {escape(document['info']['version'])}"
    operations = [
        "".join(_operation(method, path, operation))
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    contents = [
        f'<li><a href="#{escape(method + path)}"><code>{method.upper()} {escape(path)}</code></a>'
        for path, methods in document["paths"].items()
        for method in methods
    ]
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<title>{title}</title><style>{STYLE}</style><h1>{title}</h1><p>For programs: <a href="openapi.json">'
        f"openapi.json</a></p><ul>{''.join(contents)}</ul>{''.join(operations)}</html>"
    )


def _operation(method: str, path: str, operation: JsonObject) -> Iterator[str]:
    name = f"<code>{method.upper()} {escape(path)}</code>"
    yield f'<h2 id="{escape(method + path)}">{name}</h2><p>{_prose(operation["summary"])}</p>'
    if "requestBody" in operation:
        for content in operation["requestBody"]["content"].values():
            for schema in content["schema"].get("anyOf", [content["schema"]]):
                yield from _table(schema)
    yield "<h3>Responses</h3><table>"
    for status, response in operation["responses"].items():
        kinds = " or ".join(response["content"])
        yield f"<tr><td>{escape(status)}<td>{_prose(response['description'])}<td>{escape(kinds)}"
    yield "</table>"


def _table(schema: JsonObject) -> Iterator[str]:
    yield "<h3>Fields</h3><table>"
    for name, words in _rows(schema, ""):
        yield f"<tr><td><code>{escape(name)}</code><td>{_prose(words)}"
    yield "</table>"


def _rows(schema: JsonObject, within: str) -> Iterator[tuple[str, str]]:
    """Yield each field with its description; nested fields follow the field."""
    for name, field in schema["properties"].items():
        default = f"; default `{json.dumps(field['default'])}`" if "default" in field else ""
        yield within + name, field.get("description", "") + default
        for kind in field.get("anyOf", [field]):
            is_list = kind.get("type") == "array"
            inner = kind["items"] if is_list else kind
            if any("description" in each for each in inner.get("properties", {}).values()):
                yield from _rows(inner, f"{within}{name}{'[]' if is_list else ''}.")


def _prose(text: str) -> str:
    """Escape a text for HTML; text between backticks becomes code."""
    return CODE.sub(r"<code>\1</code>", escape(text))
