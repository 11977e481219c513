"""/v1/responses, seen by the openai client: whole and streamed, which must agree, and agree with chats."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from openai.types.responses import ResponseFunctionToolCall, ResponseReasoningItem

from common.base.errors import RequestError
from common.settings.config import ModelSection
from router.base.helper_frames import Kind
from router.reading.bodies import NUM_FREE_BYTES
from router.reading.packed_requests import unpack
from router.reading.reading import read
from router.requests.responses_fields import RESPONSES_FIELDS
from router.text.chat_template import ChatTemplate
from router.text.tokenizer import Tokenizer
from tests.router.conftest import MAX_MODEL_LEN, Client, Cluster

SAID = "the quick brown fox"
PROMPT = f"user: {SAID}\nassistant:"
SCHEMA = {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"], "additionalProperties": False}
TOOL = {"type": "function", "name": "f", "description": "d", "parameters": SCHEMA, "strict": True}
IMAGE = {"type": "input_image", "image_url": "https://x", "detail": "auto"}
ANSWER = {"type": "function_call_output", "call_id": "c", "output": "sun"}


@pytest.fixture(scope="module")
def ours(model_dir: Path) -> Tokenizer:
    return Tokenizer(ModelSection(path=str(model_dir)))


async def ask(client: Client, **fields: Any) -> Any:
    """A whole response, after seeing that the last event of a stream says the same."""
    extra = {"input": SAID, "temperature": 0, "max_output_tokens": 12} | fields
    create: Any = client.openai.responses.create
    whole = await create(model="tiny", extra_body=extra)
    events = [event async for event in await create(model="tiny", stream=True, extra_body=extra)]
    assert [event.sequence_number for event in events] == [*range(len(events))]
    last = events[-1]
    assert last.type == f"response.{whole.status}"
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert {event.response.id for event in events if hasattr(event, "response")} == {last.response.id}
    assert comparable(last.response) == comparable(whole)
    return whole


def comparable(response: Any) -> dict[str, Any]:
    """All that two responses to one request have in common."""
    fields: dict[str, Any] = response.to_dict()
    assert fields.pop("id").startswith("resp_")
    for name in ("created_at", "completed_at"):
        fields.pop(name)
    fields["usage"].pop("input_tokens_details")
    for item in fields["output"]:
        item.pop("id")
    return fields


async def post(cluster: Cluster, path: str = "/v1/responses", **fields: Any) -> tuple[int, Any]:
    body = {"input": SAID, "temperature": 0} | fields
    async with aiohttp.ClientSession(cluster.url) as session, session.post(path, json=body) as response:
        return response.status, await response.json()


@pytest.mark.medium
async def test_an_answer_is_that_of_a_chat_which_says_the_same(client: Client) -> None:
    whole = await ask(client)
    assert whole.output_text == client.expected(PROMPT, max_tokens=12)
    assert (whole.object, whole.status, whole.incomplete_details.reason) == (
        "response", "incomplete", "max_output_tokens",
    )  # fmt: skip
    num_prompt = len(client.ids(PROMPT))
    usage = whole.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (num_prompt, 12, num_prompt + 12)
    parts = [{"type": "input_text", "text": "the quick"}, {"type": "input_text", "text": "brown fox"}]
    conversation = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": parts},
    ]
    quick = await ask(client, input=conversation, instructions="Hm", chat_template_kwargs={"be_quick": True})
    prompt = "system: Hm\nsystem: Be brief.\nuser: the quick\nbrown fox\nassistant: now"
    assert quick.output_text == client.expected(prompt, max_tokens=12)
    stop = whole.output_text[3:5]
    stopped = await ask(client, stop=stop)
    assert stopped.output_text == whole.output_text[: whole.output_text.index(stop)]
    assert (stopped.status, stopped.incomplete_details) == ("completed", None)
    full = await ask(client, max_output_tokens=None, ignore_eos=True)
    assert full.usage.total_tokens == MAX_MODEL_LEN


@pytest.mark.medium
async def test_a_response_repeats_its_request_and_takes_what_concerns_only_openai(client: Client) -> None:
    fields: dict[str, Any] = {
        "instructions": "Be brief.", "metadata": {"a": "b"}, "user": "u", "safety_identifier": "s", "top_p": 0.5,
        "prompt_cache_key": "k", "reasoning": {"effort": "low", "summary": "auto"}, "text": {"verbosity": "low"},
    }  # fmt: skip
    taken = {
        "store": True, "service_tier": "flex", "include": ["reasoning.encrypted_content"], "truncation": "disabled",
        "background": False, "max_tool_calls": 3, "prompt_cache_retention": "24h", "top_logprobs": 0,
        "stream_options": {"include_obfuscation": False}, "previous_response_id": None, "conversation": None,
        "tool_choice": "none",
    }  # fmt: skip
    told = (await ask(client, **fields, **taken)).to_dict()
    assert {name: told[name] for name in fields if name != "text"} == {
        name: value for name, value in fields.items() if name != "text"
    }
    assert told["text"] == {"format": {"type": "text"}, "verbosity": "low"}
    assert (told["store"], told["service_tier"], told["tool_choice"]) == (False, "default", "none")


@pytest.mark.medium
async def test_log_probabilities_are_told_where_they_are_included(client: Client) -> None:
    include = ["message.output_text.logprobs"]
    [part] = (await ask(client, include=include, top_logprobs=2)).output[0].content
    assert len(part.logprobs) == 12
    assert all(len(token.top_logprobs) == 2 for token in part.logprobs)
    assert (await ask(client, include=include)).output[0].content[0].logprobs[0].top_logprobs == []
    assert (await ask(client, top_logprobs=2)).output[0].content[0].logprobs == []


REFUSED: list[tuple[str, str, dict[str, Any]]] = [
    ("input", "missing_field", {"input": None}),
    ("input", "invalid_value", {"input": []}),
    (
        "input",
        "chat_template_error",
        {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}, ANSWER]},
    ),
    ("input", "context_length_exceeded", {"input": "the quick " * 700}),
    ("input", "context_length_exceeded", {"input": "the quick " * 70_000}),
    ("input[0]", "unsupported_value", {"input": [{"type": "item_reference", "id": "msg_1"}]}),
    ("input[0].type", "unsupported_value", {"input": [{"type": "web_search_call", "id": "ws_1"}]}),
    ("input[0].role", "invalid_value", {"input": [{"role": "tool", "content": "x"}]}),
    ("input[0].content", "missing_field", {"input": [{"role": "user"}]}),
    ("input[0].content[0].type", "invalid_value", {"input": [{"role": "user", "content": [IMAGE]}]}),
    ("input[0].call_id", "invalid_value", {"input": [ANSWER]}),
    ("previous_response_id", "unsupported_value", {"previous_response_id": "resp_1"}),
    ("conversation", "unsupported_value", {"conversation": "conv_1"}),
    ("background", "unsupported_value", {"background": True}),
    ("prompt", "unsupported_value", {"prompt": {"id": "pmpt_1"}}),
    ("truncation", "unsupported_value", {"truncation": "auto"}),
    ("tools[0].type", "unsupported_value", {"tools": [{"type": "web_search"}]}),
    ("tools[0].name", "invalid_value", {"tools": [{"type": "function", "function": {"name": "f"}}]}),
    ("tools", "unsupported_value", {"tools": [TOOL]}),
    ("tool_choice", "invalid_value", {"tool_choice": "required"}),
    ("tool_choice", "invalid_value", {"tool_choice": {"type": "file_search"}}),
    ("tool_choice", "invalid_value", {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}),
    ("text.format.schema", "missing_field", {"text": {"format": {"type": "json_schema", "name": "x"}}}),
    (
        "text.format.schema",
        "invalid_grammar",
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "nothing"}}}},
    ),
    ("include", "invalid_value", {"include": ["everything"]}),
    ("metadata", "invalid_value", {"metadata": {"a": 1}}),
    ("maximum", "unknown_field", {"maximum": 3}),
]
NAMES_OF_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 3}, "send max_output_tokens"),
    ({"messages": []}, "send input"),
    ({"response_format": {"type": "json_object"}}, r"send text\.format"),
]


@pytest.mark.medium
async def test_what_cannot_be_done_is_refused_by_name(cluster: Cluster) -> None:
    for param, code, fields in REFUSED:
        status, body = await post(cluster, **fields)
        assert (status, body["error"]["param"], body["error"]["code"]) == (400, param, code), (fields, body)


@pytest.mark.medium
async def test_a_name_of_chats_is_told_its_own(cluster: Cluster) -> None:
    for fields, remedy in NAMES_OF_CHATS:
        status, body = await post(cluster, **fields)
        assert (status, body["error"]["param"]) == (400, *fields)
        assert re.search(remedy, body["error"]["message"]), body


@pytest.mark.medium
async def test_a_long_conversation_is_read_as_a_short_one(cluster: Cluster) -> None:
    said = [{"role": "user", "content": " " * NUM_FREE_BYTES + SAID}]  # the template leaves out the space
    answers = [await post(cluster, input=each, max_output_tokens=8) for each in (said, SAID)]
    assert [status for status, _ in answers] == [200, 200]
    long, short = (body["output"][0]["content"] for _, body in answers)
    assert long == short


async def test_a_model_without_a_template_says_so(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster.service.tokenizer, "chat_template", None)
    status, body = await post(cluster)
    assert (status, body["error"]["param"], body["error"]["code"]) == (400, "input", "no_chat_template")


def messages(items: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = RESPONSES_FIELDS.read({"input": items})["input"]
    return found


def test_what_the_assistant_said_in_one_answer_is_one_message() -> None:
    reasoning = {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "Hm"}],
    }
    message = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
               "content": [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}]}  # fmt: skip
    call = {"type": "function_call", "id": "fc_1", "call_id": "c", "name": "f", "arguments": '{"a": null}'}
    asked = {"role": "user", "content": "Look"}
    called = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": None}}}
    answered = {"role": "tool", "content": "sun", "tool_call_id": "c"}
    again = {"id": "d", **{name: value for name, value in called.items() if name != "id"}}
    assert messages([asked, reasoning, message, call, call | {"call_id": "d"}, ANSWER]) == [
        asked,
        {"role": "assistant", "content": "I look.", "reasoning_content": "Hm", "tool_calls": [called, again]},
        answered,
    ]
    assert messages([reasoning, call, ANSWER, reasoning, message, message]) == [
        {"role": "assistant", "content": "", "reasoning_content": "Hm", "tool_calls": [called]},
        answered,
        {"role": "assistant", "content": "I look.", "reasoning_content": "Hm"},
        {"role": "assistant", "content": "I look."},
    ]
    summed = {"type": "reasoning", "id": "rs_2", "summary": [{"type": "summary_text", "text": "So"}]}
    encrypted = {"type": "reasoning", "id": "rs_3", "summary": [], "encrypted_content": "xyz"}
    assert messages([encrypted, summed, call]) == [
        {"role": "assistant", "content": "", "reasoning_content": "So", "tool_calls": [called]}
    ]


def test_items_come_back_as_the_package_keeps_them() -> None:
    call = ResponseFunctionToolCall(type="function_call", id="fc_1", call_id="c", name="f", arguments="{}")
    thought = ResponseReasoningItem.model_validate(
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]}
    )
    answer = {**ANSWER, "output": [{"type": "input_text", "text": "sun"}], "id": None, "status": "completed"}
    for items in (
        [thought.model_dump(), call.model_dump(), answer],
        [thought.to_dict(), call.to_dict(), answer | {"provider_data": {"model": "m"}}],
    ):
        first, second = messages(json.loads(json.dumps(items)))
        assert (first["reasoning_content"], first["tool_calls"][0]["id"]) == ("Hm", "c")
        assert second == {"role": "tool", "content": "sun", "tool_call_id": "c"}


def test_tools_and_forms_are_those_of_a_chat(ours: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request is the same in all but what a response repeats."""
    source = "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}{{ messages[0].content }}"
    monkeypatch.setattr(ours, "chat_template", ChatTemplate(source, {}))
    function = {name: TOOL[name] for name in ("name", "description", "parameters", "strict")}
    named = {"type": "function", "name": "f"}
    form = {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"tools": [TOOL]}, {"tools": [{"type": "function", "function": function}]}),
        (
            {"tools": [TOOL], "tool_choice": named, "parallel_tool_calls": False},
            {
                "tools": [{"type": "function", "function": function}],
                "tool_choice": {"type": "function", "function": {"name": "f"}},
                "parallel_tool_calls": False,
            },
        ),
        (
            {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [named]}},
            {
                "tools": [{"type": "function", "function": function}],
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "f"}}]},
                },
            },
        ),
        (
            {"text": {"format": form}},
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
                }
            },
        ),
        ({"text": {"format": {"type": "json_object"}}}, {"response_format": {"type": "json_object"}}),
        ({"text": {"format": {"type": "text"}}}, {}),
    ]
    for fields, chat in cases:
        found, expected = (
            unpack(read(bytearray(json.dumps(body | {"seed": 1}).encode()), ours, 400, kind))
            for kind, body in (
                (Kind.RESPONSE, {"input": SAID} | fields),
                (Kind.CHAT, {"messages": [{"role": "user", "content": SAID}]} | chat),
            )
        )
        assert list(found.prompts) == list(expected.prompts)
        assert (found.sampling, found.response.tool_format) == (expected.sampling, expected.response.tool_format)
        assert (found.grammar.kind, found.grammar.text) == (expected.grammar.kind, expected.grammar.text)
        told = json.loads(found.response.repeated)
        assert (told["tools"], told["tool_choice"]) == (fields.get("tools", []), fields.get("tool_choice", "auto"))
        assert told["text"]["format"] == fields.get("text", {}).get("format", {"type": "text"})


def test_a_form_that_stands_where_none_may_is_named_as_it_was_sent(ours: Tokenizer) -> None:
    form = {"type": "json_object"}
    body = {"input": SAID, "text": {"format": form}, "structured_outputs": {"choice": ["a"]}}
    with pytest.raises(RequestError, match=r"^text\.format and structured_outputs\.choice"):
        unpack(read(bytearray(json.dumps(body).encode()), ours, 400, Kind.RESPONSE))


@pytest.mark.medium
async def test_the_client_that_blocks(cluster: Cluster) -> None:
    def talk() -> tuple[str, str]:
        with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=100.0) as blocking:
            fields: dict[str, Any] = {"model": "tiny", "input": SAID, "max_output_tokens": 12, "temperature": 0}
            whole = blocking.responses.create(**fields)
            with blocking.responses.stream(**fields) as stream:
                deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
            return whole.output_text, "".join(deltas)

    whole, streamed = await asyncio.to_thread(talk)
    assert whole == streamed
