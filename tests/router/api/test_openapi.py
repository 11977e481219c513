"""The document says what the server does: requests made of it, right and wrong, get what it promises."""

import asyncio
import html
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import jsonschema_rs
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from router.api.documents import get_docs, get_openapi
from router.api.openapi import ENDPOINTS, REASONS
from router.api.status_page_files import OPEN_PAGES
from router.text.server_rules import decimals
from tests.router.conftest import Cluster, StartCluster

ROOT = Path(__file__).parents[3]
NUM_EXAMPLES = 25
PROMISES = [
    not_a_server_error,
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
]
UNSAID = re.compile(
    "best_of = |min_tokens = |one form at a time|only with JSON that is asked for|wants the name of one of the tools|"
    "wants tools to call|wants what max_tokens is|that of a function_call before it|no tools beside it|"
    "at most .* in all|together at most|prompt and output together|model's chat template|bad_words has|"
    "does not end the text|a JSON schema as an object or its text"
)
"""What is refused of what the document allows: no schema says how values go together, and what a template takes."""


REFUSALS = {"expected-statuses": ["400", "404", "413"]}
"""Statuses of answers to wrong requests, some of which are too large to be read at all."""
CONFIG = schemathesis.Config.from_dict({"checks": {"negative_data_rejection": REFUSALS}})


def nothing_else_is_refused(_: Any, response: Any, case: Any) -> None:
    """Of what the document allows, but programs: a schema, a regular expression, a grammar."""
    if response.status_code in (400, 404):
        error = response.json()["error"]
        is_program = error["code"] in ("invalid_grammar", "context_length_exceeded")
        assert is_program or UNSAID.search(error["message"]), (error, case.body)


async def described(cluster: Cluster) -> dict[str, Any]:
    async with aiohttp.ClientSession(cluster.url) as session, session.get("/openapi.json") as response:
        assert response.content_type == "application/json"
        document: dict[str, Any] = await response.json()
        return document


async def test_every_handler_is_described(start_cluster: StartCluster) -> None:
    cluster = await start_cluster()
    handlers = {route.handler for resource in cluster.runner.app.router.resources() for route in resource}
    assert handlers == {*ENDPOINTS, get_openapi, get_docs, *OPEN_PAGES}
    document = await described(cluster)
    assert document["openapi"] == "3.1.0"
    assert {"429", "503", "504"} <= set(document["paths"]["/v1/completions"]["post"]["responses"])
    assert all(operation["summary"] for methods in document["paths"].values() for operation in methods.values())


def test_every_status_of_an_error_has_its_reason() -> None:
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "router").rglob("*.py")]
    assert {int(status) for text in sources for status in re.findall(r"status=([45]\d\d)\b", text)} <= set(REASONS)


async def test_the_page_has_every_path_and_field_and_nothing_from_elsewhere(start_cluster: StartCluster) -> None:
    cluster = await start_cluster()
    document = await described(cluster)
    async with aiohttp.ClientSession(cluster.url) as session, session.get("/docs") as response:
        assert response.content_type == "text/html"
        text = html.unescape(await response.text())
    fields = document["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert all(f"<code>{name}</code>" in text for name in fields["properties"])
    assert all(path in text for path in document["paths"])
    assert "<code>stream_options.include_usage</code>" in text and "<code>messages[].tool_calls[].function.name" in text
    assert "an integer from 1 to 128; texts for each prompt; default <code>1</code>" in text and "`" not in text
    assert all(text.count(f'href="#{target}"') == 1 for target in re.findall('<h2 id="([^"]*)"', text))
    assert 'name="viewport"' in text
    assert "<script" not in text and "http" not in text


async def test_keys_are_part_of_the_document(start_cluster: StartCluster, tmp_path: Any) -> None:
    (tmp_path / "keys").write_text("k" * 20)
    cluster = await start_cluster(api_key_file=str(tmp_path / "keys"))
    session = aiohttp.ClientSession(cluster.url, headers={"X-Api-Key": "k" * 20})
    async with session, session.get("/openapi.json") as response:
        paths = (await response.json())["paths"]
    assert "security" in paths["/v1/completions"]["post"]
    assert "security" not in paths["/health"]["get"]


@pytest.mark.slow
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["right", "wrong"])
async def test_requests_made_of_the_document_get_what_it_promises(
    start_cluster: StartCluster, mode: GenerationMode
) -> None:
    cluster = await start_cluster()
    cluster.prefill()
    cluster.decode().is_hasty = True
    await cluster.until_paths(1)
    schema = schemathesis.openapi.from_dict(await described(cluster), config=CONFIG)
    operations: list[Any] = [result.ok() for result in schema.get_all_operations()]
    assert len(operations) > 10
    for operation in operations:
        if operation.body or mode is GenerationMode.POSITIVE:  # nothing can be wrong about what takes nothing
            checks = [*PROMISES, *([nothing_else_is_refused] if mode is GenerationMode.POSITIVE else [])]
            await asyncio.to_thread(call_of(operation.as_strategy(generation_mode=mode), checks, cluster.url))


def call_of(strategy: Any, checks: Any, url: str) -> Callable[[], None]:
    """Sends what the strategy makes, and checks what comes back."""

    @settings(max_examples=NUM_EXAMPLES, deadline=None, phases=[Phase.generate], suppress_health_check=[*HealthCheck])
    @given(case=strategy)
    def call(case: Any) -> None:
        case.call_and_validate(base_url=url, checks=checks, timeout=100)

    return call


def tool(**fields: Any) -> dict[str, Any]:
    """Make a function that may be called."""
    return {"name": "f"} | fields


BODIES: list[tuple[str, dict[str, Any], bool]] = [
    *(
        (
            "/v1/chat/completions",
            {"tool_choice": "none", "tools": [{"type": "function", "function": function}]},
            right,
        )
        for function, right in (
            (tool(parameters=None, strict=None), True),
            (tool(strict=True), True),
            (tool(strict=0), False),
            (tool(strict="true"), False),
            (tool(parameters=[]), False),
            ({"parameters": {}}, False),
        )
    ),
    *(
        ("/v1/responses", {"tool_choice": "none", "tools": [{"type": "function"} | function]}, right)
        for function, right in ((tool(strict=None), True), (tool(strict=0), False), (tool(parameters=[]), False))
    ),
    ("/v1/completions", {"guided_json": ' {"type": "object"}'}, True),
    ("/v1/completions", {"guided_json": "[]"}, False),
    ("/v1/completions", {"guided_json": ""}, False),
]
"""Path, fields, and whether they are taken."""


@pytest.mark.medium
async def test_the_schema_and_the_server_agree(cluster: Cluster) -> None:
    document = await described(cluster)
    async with aiohttp.ClientSession(cluster.url) as session:
        for path, fields, is_taken in BODIES:
            schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
            (required,) = schema["required"]
            said = [{"role": "user", "content": "hi"}] if required == "messages" else "hi"
            body = {required: said} | fields
            assert jsonschema_rs.is_valid(schema | {"components": document["components"]}, body) is is_taken, body
            async with session.post(path, json=body) as response:
                assert response.status == (200 if is_taken else 400), (body, await response.text())


@pytest.mark.parametrize("high", [0, 5, 9, 10, 99, 100, 319, 2047, 12_345])
def test_numbers_up_to_a_limit_are_what_the_pattern_of_their_digits_matches(high: int) -> None:
    pattern = re.compile(f"^({decimals(high)})$")
    assert all(pattern.search(str(number)) for number in range(high + 1))
    others = (str(high + 1), str(10 * high + 10), "00", "01", "", "-1", "1.0", f"0{high}")
    assert not any(pattern.search(text) for text in others)
