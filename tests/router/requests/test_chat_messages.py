"""The field `messages`: what libraries send back of an answer is taken, and what a role needs is there."""

import json
from pathlib import Path
from typing import Any

import pytest
from openai.types.chat import ChatCompletionMessage

from common.base.errors import RequestError
from common.settings.config import ModelSection
from router.reading.reading import parse_conversation
from router.requests.chat_fields import CHAT_FIELDS
from router.text.tokenizer import Tokenizer
from tests.router.text.test_chat_answer import F, make_choice, options, whole_choice

USER = {"role": "user", "content": "the fox"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}
READ_CALL = CALL | {"function": {"name": "f", "arguments": {"a": [1]}}}


def read(*messages: dict[str, Any]) -> Any:
    return CHAT_FIELDS.read({"messages": list(messages)})["messages"]


def test_calls_of_tools_reach_the_template_as_it_reads_them() -> None:
    (found,) = read({"role": "assistant", "content": None, "tool_calls": [CALL]})
    assert found == {"role": "assistant", "content": "", "tool_calls": [READ_CALL]}


def test_an_empty_list_of_calls_does_not_reach_the_template() -> None:
    assert read({"role": "assistant", "content": "a", "tool_calls": []}) == [{"role": "assistant", "content": "a"}]


def test_what_libraries_keep_of_a_message_is_ignored() -> None:
    function = CALL["function"] | {"parsed_arguments": {"a": [1]}}  # type: ignore[operator]
    kept = {
        "role": "assistant", "content": [{"type": "text", "text": "Well.", "annotations": [], "cache_control": {}}],
        "refusal": None, "annotations": [{"type": "url_citation"}], "provider_specific_fields": {"a": 1}, "parsed": {},
        "tool_calls": [CALL | {"index": 0, "extra_content": {}, "function": function}], "audio": None,
    }  # fmt: skip
    assert read(kept) == [{"role": "assistant", "content": "Well.", "tool_calls": [READ_CALL]}]
    answer = {"role": "tool", "tool_call_id": "1", "content": "5", "artifact": {}}
    assert read(answer) == [{"role": "tool", "tool_call_id": "1", "content": "5"}]
    refused = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}], "refusal": "No."}
    assert read(refused) == [{"role": "assistant", "content": "No."}]


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_thoughts_have_two_names(name: str) -> None:
    assert read({"role": "assistant", "content": "a", name: "why"})[0]["reasoning_content"] == "why"


@pytest.mark.parametrize(("sent", "found"), [("", {}), (" ", {}), ('{"a": "cut o', '{"a": "cut o'), ("[1]", "[1]")])
def test_arguments_of_a_call_that_was_cut_off_go_back_as_they_are(sent: str, found: Any) -> None:
    call = CALL | {"function": {"name": "f", "arguments": sent}}
    (message,) = read({"role": "assistant", "tool_calls": [call]})
    assert message["tool_calls"][0]["function"]["arguments"] == found


@pytest.mark.parametrize("text", ["Hello", f"<think>why</think>Hello<tool_call>{F}</tool_call>"])
def test_a_message_that_came_goes_back_as_a_client_has_it(text: str) -> None:
    message = whole_choice(text, make_choice(), options("hermes"))["message"]
    assert all("index" not in call for call in message.get("tool_calls", []))
    typed = ChatCompletionMessage.model_validate(message)
    sent = [message, typed.model_dump(), typed.model_dump(exclude_none=True), typed.to_dict()]
    assert all(read(each) == read(message) for each in sent)
    assert read(message)[0].get("reasoning_content") == message.get("reasoning_content")


@pytest.mark.parametrize(
    ("param", "code", "messages"),
    [
        ("messages[0].content", "missing_field", [{"role": "user"}]),
        ("messages[1].content", "missing_field", [USER, {"role": "user", "content": None}]),
        ("messages[0].content", "missing_field", [{"role": "user", "contents": "a"}]),
        ("messages[0].content", "missing_field", [{"role": "system"}]),
        ("messages[0].content", "missing_field", [{"role": "tool", "tool_call_id": "1"}]),
        ("messages[0].tool_call_id", "missing_field", [{"role": "tool", "content": "a"}]),
        ("messages[0].tool_calls[0].function", "missing_field", [{"role": "assistant", "tool_calls": [{"id": "1"}]}]),
        ("messages[0].content[0].type", "invalid_value", [{"role": "user", "content": [{"text": "a"}]}]),
        ("messages[0].content[0].text", "invalid_value", [{"role": "user", "content": [{"type": "text"}]}]),
        ("messages[0].reasoning", "invalid_value", [USER | {"reasoning": 5}]),
        ("messages[0].function_call", "unsupported_value", [{"role": "assistant", "function_call": {"name": "f"}}]),
    ],
)
def test_what_is_wrong_is_named(model_dir: Path, param: str, code: str, messages: Any) -> None:
    ours = Tokenizer(ModelSection(path=str(model_dir)))
    with pytest.raises(RequestError) as caught:
        parse_conversation(json.dumps({"messages": messages}).encode(), ours, 100)
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, param, code)
