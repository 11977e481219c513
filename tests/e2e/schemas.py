"""Texts that are asked to be held to schemas, in every way that clients have for it."""

import asyncio
import json
from typing import Any

import aiohttp

from tests.e2e.client import Completion, complete

MAX_TOKENS = 250
PROMPT = "ROMEO: "


def asked(schema: Any, seed: int) -> dict[str, Any]:
    """Ways to ask for the same, one after the other."""
    ways: list[dict[str, Any]] = [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "it", "strict": True, "schema": schema}}},
        {"structured_outputs": {"json": schema, "disable_any_whitespace": True}},
        {"guided_json": json.dumps(schema), "guided_whitespace_pattern": " "},
    ]
    return {"temperature": 1.0, "seed": seed, "max_tokens": MAX_TOKENS, **ways[seed % len(ways)]}


async def complete_schemas(url: str, schemas: list[Any], into: list[Completion]) -> None:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        streams = (
            complete(session, url, PROMPT, target, **asked(schema, seed))
            for seed, (schema, target) in enumerate(zip(schemas, into, strict=True))
        )
        await asyncio.gather(*streams)
