"""Output items and events of /v1/responses: by the openai package's own types, and the same however a text arrives."""

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from common.base.errors import RequestError
from router.answers.request_choices import Job
from router.answers.responses_answer import StreamedResponse, WholeResponse
from router.answers.responses_shapes import ResponseBody
from router.base.shapes import schema_of
from router.dispatch.completion.choice import Delivery
from router.requests.completion_api import ResponseOptions
from router.requests.responses_fields import RESPONSES_FIELDS
from router.text.formats.shapes import Thoughts
from tests.support.completions import choice_of, make_completion

CALL = '<tool_call>{"name": "f", "arguments": {"a": "ü"}}</tool_call>'
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
HEAD = {"id": "resp_1", "object": "response", "created_at": 1, "model": "m"}
REPEATED = {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True}


def job(
    thoughts: Thoughts = "may come", finish_reason: str = "stop", has_summary: bool = False, tool_format: str = "hermes"
) -> Job:
    options = ResponseOptions(
        stream=False,
        include_usage=False,
        continuous_usage=False,
        token_ids=False,
        tokens_as_ids=False,
        thoughts=thoughts,
        tool_format=tool_format,
        repeated=json.dumps(REPEATED),
        has_summary=has_summary,
    )
    choice = choice_of(make_completion())
    choice.output.finish_reason = finish_reason
    shaper: Any = None
    return Job(HEAD, options, 1, 1, [choice], choice.mailbox, shaper)


def deliveries(text: str, size: int, finish_reason: str) -> list[Delivery]:
    """Deliveries of a text in pieces of a size, the last one with the reason."""
    pieces = [text[i : i + size] for i in range(0, len(text), size)] or [""]
    found = [Delivery(0, piece, index + 1) for index, piece in enumerate(pieces)]
    return [*found[:-1], structs.replace(found[-1], finish_reason=finish_reason)]


def events_of(written: bytes) -> list[dict[str, Any]]:
    """Read server-sent events; each is named as its type, and they are numbered."""
    found = []
    for number, event in enumerate(written.decode("ascii").split("\n\n")[:-1]):
        name, data = event.split("\n")
        fields = json.loads(data.removeprefix("data: "))
        assert (name, fields["sequence_number"]) == (f"event: {fields['type']}", number)
        EVENTS.validate_python(fields, strict=False)
        found.append(fields)
    return found


def streamed(text: str, size: int, finish_reason: str = "stop", num_at_once: int = 1) -> list[dict[str, Any]]:
    answer = StreamedResponse(job(finish_reason=finish_reason))
    news = deliveries(text, size, finish_reason)
    parts = [news[i : i + num_at_once] for i in range(0, len(news), num_at_once)]
    written = b"".join(asyncio.run(answer.events(part)) for part in parts)
    return events_of(written + answer.end(is_complete=True))


def whole(text: str, finish_reason: str = "stop") -> dict[str, Any]:
    answer = WholeResponse(job(finish_reason=finish_reason))
    for delivery in deliveries(text, max(1, len(text)), finish_reason):
        answer.add(delivery)
    body: dict[str, Any] = json.loads(asyncio.run(answer.body()))
    Response.model_validate(body)
    return body


def told(output: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    """Kind, text or call, and status of each item."""
    return [
        (
            item["type"],
            f"{item['name']}({item['arguments']})" if item["type"] == "function_call" else item["content"][0]["text"],
            item["status"],
        )
        for item in output
    ]


def put_together(events: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Kind and text of each item as its deltas say it; what closes an item says the same."""
    texts: dict[int, list[str]] = {}
    kinds: dict[int, str] = {}
    for event in events:
        match event["type"].split("."):
            case [_, "output_item", "added"]:
                kinds[event["output_index"]] = event["item"]["type"]
                texts[event["output_index"]] = []
            case [_, _, "delta"]:
                texts[event["output_index"]].append(event["delta"])
            case [_, "output_text" | "reasoning_text" | "reasoning_summary_text", "done"]:
                assert event["text"] == "".join(texts[event["output_index"]])
            case [_, "function_call_arguments", "done"]:
                assert event["arguments"] == "".join(texts[event["output_index"]])
    return [(kinds[index], "".join(texts[index])) for index in texts]


@pytest.mark.medium
@pytest.mark.parametrize(
    ("text", "finish_reason", "expected"),
    [
        ("Hello\n", "stop", [("message", "Hello\n", "completed")]),
        ("", "stop", [("message", "", "completed")]),
        ("", "length", [("message", "", "incomplete")]),
        ("Hel", "length", [("message", "Hel", "incomplete")]),
        ("<think>\nwhy\n</think>\n\nHello", "stop",
         [("reasoning", "why", "completed"), ("message", "Hello", "completed")]),
        ("<think>\nwh", "length", [("reasoning", "wh", "incomplete")]),
        ("<think>\nwhy\n</think>", "stop", [("reasoning", "why", "completed"), ("message", "", "completed")]),
        (CALL, "stop", [("function_call", 'f({"a": "ü"})', "completed")]),
        (f"{CALL[:-12]}\nWell.", "stop",
         [("function_call", 'f({"a": "ü"})', "completed"), ("message", "Well.", "completed")]),
        (CALL[:45], "length", [("function_call", 'f({"a": ")', "incomplete")]),
        (f"Well.\n{CALL}\n{CALL}", "stop",
         [("message", "Well.", "completed"), ("function_call", 'f({"a": "ü"})', "completed"),
          ("function_call", 'f({"a": "ü"})', "completed")]),
        (f"{CALL} So.", "length", [("function_call", 'f({"a": "ü"})', "completed"), ("message", " So.", "incomplete")]),
    ],
)  # fmt: skip
def test_items_of_an_answer_whole_and_streamed(text: str, finish_reason: str, expected: Any) -> None:
    body = whole(text, finish_reason)
    status = {"stop": "completed", "length": "incomplete"}[finish_reason]
    details = {"stop": None, "length": {"reason": "max_output_tokens"}}[finish_reason]
    assert (body["status"], body["incomplete_details"]) == (status, details)
    assert told(body["output"]) == expected
    for size, num_at_once in ((1, 1), (1, 7), (3, 2)):
        events = streamed(text, size, finish_reason, num_at_once)
        assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
        assert events[0]["response"]["output"] == [] and events[0]["response"]["status"] == "in_progress"
        assert events[-1]["type"] == f"response.{status}"
        ended = events[-1]["response"]
        assert told(ended["output"]) == expected
        assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == ended["output"]
        assert put_together(events) == [(kind, said.removeprefix("f(").removesuffix(")")) for kind, said, _ in expected]


@pytest.mark.medium
@given(
    st.lists(st.sampled_from(["<think>", "</think>", CALL, "{", "\n", " ", "ü"]), max_size=8).map("".join),
    st.integers(1, 9),
)
@settings(max_examples=60, deadline=None)
def test_any_answer_is_one_that_the_client_puts_together(text: str, num_at_once: int) -> None:
    """The accumulator of the openai package knows which events may follow one another."""
    events = streamed(text, 1, num_at_once=num_at_once)
    state = ResponseStreamState(input_tools=[], text_format=omit)
    for event in events:
        state.handle_event(EVENTS.validate_python(event))
    assert state._completed_response is not None
    assert [item.to_dict() for item in state._completed_response.output] == [
        {**item, **parsed(item)} for item in events[-1]["response"]["output"]
    ]
    assert put_together(events) == put_together(streamed(text, 1))


def parsed(item: dict[str, Any]) -> dict[str, Any]:
    """Add what the package's parser adds."""
    if item["type"] == "function_call":
        return {"parsed_arguments": None}
    return {"content": [{**part, "parsed": None} for part in item["content"]]} if item["type"] == "message" else {}


def test_thoughts_come_as_a_summary_where_one_is_asked_for() -> None:
    """Some clients show nothing else; the package's accumulator takes the events."""
    answer = StreamedResponse(job(has_summary=True))
    text = "<think>why</think>Hello"
    events = events_of(b"".join(asyncio.run(answer.events([each])) for each in deliveries(text, 1, "stop")))
    steps = ["summary_part.added", "summary_text.delta", "summary_text.done", "summary_part.done"]
    seen = dict.fromkeys(event["type"].removeprefix("response.reasoning_") for event in events)
    assert [step for step in seen if step in steps] == steps
    reasoning, message = events[-1]["response"]["output"]
    assert reasoning["summary"] == [{"type": "summary_text", "text": "why"}] and "content" not in reasoning
    assert message["content"][0]["text"] == "Hello"
    assert put_together(events) == [("reasoning", "why"), ("message", "Hello")]


def test_a_call_that_a_stop_string_cut_off_is_incomplete() -> None:
    answer = WholeResponse(job(tool_format="xml"))
    for delivery in deliveries("<tool_call><function=f><parameter=a>\nhalf of", 9, "stop"):
        answer.add(delivery)
    assert told(json.loads(asyncio.run(answer.body()))["output"]) == [
        ("function_call", 'f({"a": "half of)', "incomplete")
    ]


def test_deltas_of_one_item_are_one_event_for_a_client_that_is_slow() -> None:
    events = streamed("Hello there", 1, num_at_once=100)
    assert [event["delta"] for event in events if event["type"] == "response.output_text.delta"] == ["Hello there"]


def test_tokens_of_thoughts_are_counted() -> None:
    text = "<think>why</think>Hello"
    assert whole("Hello")["usage"]["output_tokens_details"] == {"reasoning_tokens": 0}
    for num_at_once in (1, 100):
        usage = streamed(text, 1, num_at_once=num_at_once)[-1]["response"]["usage"]
        assert usage["output_tokens_details"]["reasoning_tokens"] == len("<think>why")


def test_an_error_amid_a_stream_is_a_response_that_failed() -> None:
    answer = StreamedResponse(job())
    written = asyncio.run(answer.events([Delivery(0, "Hel", 1)]))
    error = RequestError("the worker died", code="worker_lost", status=503)
    written += asyncio.run(answer.events([Delivery(0, "lo", 2), Delivery(0, "", error=error)]))
    last = events_of(written + answer.end(is_complete=False))[-1]
    assert last["type"] == "response.failed" and last["response"]["status"] == "failed"
    assert last["response"]["error"] == {"code": "server_error", "message": "the worker died"}


def test_the_document_names_every_field_of_a_response_and_its_table_those_that_it_repeats() -> None:
    body = set(whole("Hello"))
    assert body - set(schema_of(ResponseBody)["properties"]) == set()
    assert set(REPEATED) <= set(RESPONSES_FIELDS.fields)
