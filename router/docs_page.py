"""`/docs`: an OpenAPI document as a page for people, without scripts and without anything from elsewhere."""

import json
from collections.abc import Iterator
from html import escape
from typing import Any

STYLE = (
    "body{font:16px/1.5 sans-serif;max-width:60em;margin:2em auto;padding:0 1em}"
    "table{border-collapse:collapse}td{padding:.2em 1em .2em 0;vertical-align:top;border-top:1px solid #ccc}"
    "code{overflow-wrap:anywhere}"
)
MAX_SCHEMA_CHARS = 300


def page(document: dict[str, Any]) -> str:
    """The whole page."""
    title = f"{escape(document['info']['title'])} {escape(document['info']['version'])}"
    operations = [
        "".join(_operation(method, path, operation))
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
        f'<h1>{title}</h1><p>For programs: <a href="openapi.json">openapi.json</a></p>{"".join(operations)}</html>'
    )


def _operation(method: str, path: str, operation: dict[str, Any]) -> Iterator[str]:
    yield f"<h2><code>{method.upper()} {escape(path)}</code></h2><p>{escape(operation['summary'])}</p>"
    if "requestBody" in operation:
        for content in operation["requestBody"]["content"].values():
            for schema in content["schema"].get("anyOf", [content["schema"]]):
                yield from _table(schema["properties"].items(), schema["required"])
    yield "<h3>Responses</h3><table>"
    for status, response in operation["responses"].items():
        kinds = " or ".join(response["content"])
        yield f"<tr><td>{escape(status)}<td>{escape(response['description'])}<td>{escape(kinds)}"
    yield "</table>"


def _table(fields: Any, required: list[str]) -> Iterator[str]:
    yield "<h3>Fields</h3><table>"
    for name, schema in fields:
        about = schema.get("description") or ("required" if name in required else "")
        values = [each for each in schema.get("anyOf", [schema]) if each != {"type": "null"}]
        text = " or ".join(json.dumps(each, ensure_ascii=False) for each in values)
        shown = text if len(text) <= MAX_SCHEMA_CHARS else text[:MAX_SCHEMA_CHARS] + " ..."
        yield f"<tr><td><code>{escape(name)}</code><td><code>{escape(shown)}</code><td>{escape(about)}"
    yield "</table>"
