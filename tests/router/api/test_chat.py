"""/v1/chat/completions, seen by the openai client: whole and streamed, which must agree, and agree with completions."""

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.base.errors import ErrorCode, RequestError
from common.settings.config import ModelSection
from router.base.helper_frames import MODEL, Kind
from router.http.errors import error_body
from router.placement.capacity import most_tokens
from router.reading.bodies import NUM_FREE_BYTES
from router.reading.packed_requests import unpack
from router.reading.reading import parse_conversation, read, tokenized
from router.requests.chat_fields import CHAT_FIELDS
from router.text.chat_model import UnpackedModel, packed_model
from router.text.chat_template import ChatTemplate
from router.text.control_tokens import ControlTokens
from router.text.tokenizer import Tokenizer
from tests.router.conftest import MAX_MODEL_LEN, Client, Cluster, StartCluster

USER = {"role": "user", "content": "the quick brown fox"}
TOOL = {"role": "tool", "tool_call_id": "1", "content": "a"}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}
PROMPT = "user: the quick brown fox\nassistant:"


@pytest.fixture(scope="module")
def ours(model_dir: Path) -> Tokenizer:
    return Tokenizer(ModelSection(path=str(model_dir)))


async def ask(client: Client, **fields: Any) -> Any:
    """A whole response, after seeing that a stream says the same."""
    extra = {"messages": [USER], "temperature": 0, "max_tokens": 12} | fields
    create: Any = client.openai.chat.completions.create
    whole = await create(model="tiny", messages=[], extra_body=extra)
    messages: dict[int, dict[str, str]] = {}
    reasons: dict[int, str] = {}
    logprobs: dict[int, list[Any]] = {}
    async for chunk in await create(model="tiny", messages=[], stream=True, extra_body=extra):
        assert (chunk.object, chunk.id[:9]) == ("chat.completion.chunk", "chatcmpl-")
        for choice in chunk.choices:
            assert (choice.delta.role == "assistant") is (choice.index not in messages)
            message = messages.setdefault(choice.index, {"role": choice.delta.role, "content": ""})
            message["content"] += choice.delta.content
            logprobs.setdefault(choice.index, []).extend(choice.logprobs.content if choice.logprobs else [])
            if choice.finish_reason:
                assert choice.index not in reasons
                reasons[choice.index] = choice.finish_reason
    assert (whole.object, whole.id[:9]) == ("chat.completion", "chatcmpl-")
    for choice in whole.choices:
        assert messages[choice.index] == {"role": choice.message.role, "content": choice.message.content}
        assert reasons[choice.index] == choice.finish_reason
        assert logprobs[choice.index] == (choice.logprobs.content if choice.logprobs else [])
    assert len(whole.choices) == len(messages)
    return whole


async def post(cluster: Cluster, **fields: Any) -> tuple[int, Any]:
    body = {"messages": [USER], "temperature": 0} | fields
    async with (
        aiohttp.ClientSession(cluster.url) as session,
        session.post("/v1/chat/completions", json=body) as response,
    ):
        return response.status, await response.json()


@pytest.mark.medium
async def test_an_answer_is_what_follows_the_prompt_that_the_template_writes(client: Client) -> None:
    whole = await ask(client)
    assert whole.choices[0].message.content == client.expected(PROMPT, max_tokens=12)
    num_prompt = len(client.ids(PROMPT))
    usage = whole.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (num_prompt, 12, num_prompt + 12)
    parts = [{"type": "text", "text": "the quick"}, {"type": "text", "text": "brown fox"}]
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts, "name": None}]
    quick = await ask(client, messages=messages, chat_template_kwargs={"be_quick": True})
    prompt = "system: Be brief.\nuser: the quick\nbrown fox\nassistant: now"
    assert quick.choices[0].message.content == client.expected(prompt, max_tokens=12)
    plain = await ask(client, add_generation_prompt=False)
    assert plain.choices[0].message.content == client.expected("user: the quick brown fox\n", max_tokens=12)
    last = {"role": "assistant", "content": "Well, "}
    continued = await ask(client, messages=[USER, last], continue_final_message=True, add_generation_prompt=False)
    prompt = "user: the quick brown fox\nassistant: Well, "
    assert continued.choices[0].message.content == client.expected(prompt, max_tokens=12)


async def test_fields_of_completions_do_what_they_do_there(client: Client) -> None:
    text = client.expected(PROMPT, max_tokens=12)
    stop = text[3:5]
    choice = (await ask(client, stop=stop)).choices[0]
    assert (choice.message.content, choice.stop_reason) == (text[: text.index(stop)], stop)
    choices = (await ask(client, n=3, seed=5, temperature=1)).choices
    assert [choice.index for choice in choices] == [0, 1, 2]


async def test_ids_of_the_prompt_stand_beside_the_choices(client: Client) -> None:
    fields = {"max_completion_tokens": 3, "max_tokens": None, "return_token_ids": True, "n": 2, "temperature": 0}
    whole = await ask(client, **fields)
    assert [choice.token_ids for choice in whole.choices] == [client.outputs(PROMPT, max_tokens=3)] * 2
    assert whole.prompt_token_ids == client.ids(PROMPT)
    assert not any(hasattr(choice, "prompt_token_ids") for choice in whole.choices)
    create: Any = client.openai.chat.completions.create
    stream = await create(model="tiny", messages=[USER], stream=True, extra_body=fields)
    told: dict[int, list[Any]] = {0: [], 1: []}
    async for chunk in stream:
        told[chunk.choices[0].index].append(getattr(chunk, "prompt_token_ids", None))
        assert not hasattr(chunk.choices[0], "prompt_token_ids")
    assert all(ids == [client.ids(PROMPT)] + [None] * (len(ids) - 1) for ids in told.values())


HARMLESS: dict[str, Any] = {
    "verbosity": "low", "store": True, "metadata": {"a": "b"}, "prompt_cache_key": "k", "prompt_cache_retention": "24h",
    "safety_identifier": "s", "service_tier": "priority", "reasoning_effort": "high", "thinking_token_budget": 5,
    "include_reasoning": False,
}  # fmt: skip


async def test_fields_that_change_nothing_are_taken(client: Client) -> None:
    whole = await ask(client, **HARMLESS)
    assert whole.choices[0].message.content == client.expected(PROMPT, max_tokens=12)


@pytest.mark.medium
async def test_without_a_limit_an_answer_may_fill_the_context(client: Client) -> None:
    whole = await ask(client, max_tokens=None, ignore_eos=True)
    assert whole.usage.total_tokens == MAX_MODEL_LEN


async def test_log_probabilities_have_the_shape_of_chats(client: Client) -> None:
    content = (await ask(client, logprobs=True, top_logprobs=2)).choices[0].logprobs.content
    ids = client.outputs(PROMPT, max_tokens=12)
    text = b"".join(bytes(token.bytes) for token in content)
    assert (len(content), text.decode(errors="replace")) == (12, client.tokenizer.decode(ids))
    for token in content:
        assert len(token.top_logprobs) == 2
        assert (token.top_logprobs[0].token, token.top_logprobs[0].logprob) == (token.token, token.logprob)
    content = (await ask(client, logprobs=True)).choices[0].logprobs.content
    assert [token.top_logprobs for token in content] == [[]] * 12


async def test_usage_of_a_stream(client: Client) -> None:
    create: Any = client.openai.chat.completions.create
    for options in ({"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}):
        stream = await create(model="tiny", messages=[USER], max_tokens=5, stream=True, stream_options=options)
        *chunks, last = [chunk async for chunk in stream]
        assert (last.choices, last.usage.completion_tokens) == ([], 5)
        counts = [chunk.usage and chunk.usage.completion_tokens for chunk in chunks]
        if len(options) > 1:
            assert (counts[0], counts[-1], counts) == (0, 5, sorted(set(counts)))
        else:
            assert set(counts) == {None}


async def test_the_client_that_blocks(client: Client, cluster: Cluster) -> None:
    def talk() -> tuple[str | None, str]:
        with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=100.0) as blocking:
            fields: dict[str, Any] = {"model": "tiny", "messages": [USER], "max_tokens": 12, "temperature": 0}
            whole = blocking.chat.completions.create(**fields)
            stream = blocking.chat.completions.create(stream=True, **fields)
            return whole.choices[0].message.content, "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    expected = client.expected(PROMPT, max_tokens=12)
    assert await asyncio.to_thread(talk) == (expected, expected)


async def test_a_long_chat_is_answered_as_a_short_one_is(client: Client) -> None:
    padded = {"role": "user", "content": " " * 2 * NUM_FREE_BYTES + USER["content"]}
    assert (await ask(client, messages=[padded])).choices[0].message.content == client.expected(PROMPT, max_tokens=12)


@pytest.mark.parametrize(
    ("param", "code", "fields"),
    [
        ("messages", "missing_field", {"messages": None}),
        ("reasoning_effort", "invalid_value", {"reasoning_effort": "much"}),
        ("thinking_token_budget", "invalid_value", {"thinking_token_budget": -2}),
        ("metadata", "invalid_value", {"metadata": "a"}),
        ("service_tier", "invalid_value", {"service_tier": "best"}),
        ("tool_choice.allowed_tools.mode", "invalid_value", {"tool_choice": ALLOWED | {"allowed_tools": {}}}),
        ("tool_choice.allowed_tools.tools", "invalid_value", {"tool_choice": ALLOWED}),
        ("messages", "invalid_value", {"messages": []}),
        ("messages", "invalid_value", {"messages": "hi"}),
        ("messages[0]", "invalid_value", {"messages": ["hi"]}),
        ("messages[0].role", "missing_field", {"messages": [{"content": "a"}]}),
        ("messages[1].role", "invalid_value", {"messages": [USER, {"role": "bot", "content": "a"}]}),
        ("messages[0].content", "invalid_value", {"messages": [{"role": "user", "content": 5}]}),
        ("messages[0].content", "invalid_value", {"messages": [{"role": "user", "content": "\ud800"}]}),
        ("messages[0].content[0].type", "invalid_value", {"messages": [USER | {"content": [{"type": "image_url"}]}]}),
        ("messages", "chat_template_error", {"messages": [TOOL]}),
        ("messages", "context_length_exceeded", {"messages": [USER | {"content": "x" * 10_000}]}),
        ("max_tokens", "invalid_value", {"max_tokens": 0}),
        ("max_completion_tokens", "invalid_value", {"max_tokens": 5, "max_completion_tokens": 6}),
        ("top_logprobs", "invalid_value", {"top_logprobs": 2}),
        ("logprobs", "invalid_value", {"logprobs": 2}),
        ("prompt", "unknown_field", {"prompt": "hi"}),
        ("max_token", "unknown_field", {"max_token": 5}),
        ("tools", "unsupported_value", {"tools": [{"type": "function", "function": {"name": "f"}}]}),
        ("tools[0]", "invalid_value", {"tools": [{"type": "function"}]}),
        ("tools[0].function.name", "invalid_value", {"tools": [{"type": "function", "function": {}}]}),
        ("tool_choice", "invalid_value", {"tool_choice": "required"}),
        ("tool_choice", "invalid_value", {"tool_choice": {"type": "function", "function": {"name": "f"}}}),
        ("tool_choice", "invalid_value", {"tool_choice": {"type": "function"}}),
        ("response_format.type", "invalid_value", {"response_format": {"type": "json"}}),
        ("chat_template", "unsupported_value", {"chat_template": "{{ messages }}"}),
        ("chat_template_kwargs.be_quik", "unknown_field", {"chat_template_kwargs": {"be_quik": True}}),
        ("chat_template_kwargs", "invalid_value", {"chat_template_kwargs": {"add_generation_prompt": True}}),
        ("continue_final_message", "invalid_value", {"continue_final_message": True, "add_generation_prompt": True}),
        ("model", "model_not_found", {"model": "other"}),
    ],
)
def test_what_is_wrong_is_named(ours: Tokenizer, param: str, code: str, fields: dict[str, Any]) -> None:
    data = json.dumps({"messages": [USER]} | fields).encode()
    with pytest.raises(RequestError) as caught:
        parse_conversation(data, ours, MAX_MODEL_LEN)
    assert (caught.value.status // 100, caught.value.param, caught.value.code) == (4, param, code)
    assert param in caught.value.message or code != "invalid_value"


@pytest.mark.parametrize(
    ("fields", "remedy"),
    [
        ({"enable_thinking": False}, "send it in chat_template_kwargs"),
        ({"extra_body": {"top_k": 5}}, "send what is in it beside the other fields"),
    ],
)
def test_a_field_in_the_wrong_place_is_told_the_right_one(ours: Tokenizer, fields: Any, remedy: str) -> None:
    with pytest.raises(RequestError, match=remedy) as caught:
        parse_conversation(json.dumps({"messages": [USER]} | fields).encode(), ours, MAX_MODEL_LEN)
    assert (caught.value.param, caught.value.code) == (*fields, "unsupported_value")


async def test_what_is_too_long_or_unknown_is_an_error_of_chats(cluster: Cluster) -> None:
    cases: list[tuple[str, str, dict[str, Any]]] = [
        ("messages", "context_length_exceeded", {"messages": [USER | {"content": "fox " * 600}]}),
        ("messages", "context_length_exceeded", {"messages": [USER | {"content": "fox " * 60_000}]}),
        ("max_tokens", "context_length_exceeded", {"max_tokens": MAX_MODEL_LEN}),
        ("prompt", "unknown_field", {"prompt": "hi"}),
        ("messages", "chat_template_error", {"messages": [TOOL]}),
    ]
    for param, code, fields in cases:
        status, body = await post(cluster, **fields)
        assert (status, body["error"]["param"], body["error"]["code"]) == (400, param, code)


@pytest.mark.parametrize(
    ("path", "field"), [("/v1/completions", "prompt"), ("/v1/chat/completions", "messages"), ("/v1/responses", "input")]
)
async def test_what_is_found_too_long_late_names_the_field_that_the_client_sent(
    start_cluster: StartCluster, path: str, field: str
) -> None:
    cluster = await start_cluster(max_queued_tokens=40)
    prefill, _ = cluster.prefill(), cluster.decode()
    await cluster.until_paths(1)
    async with aiohttp.ClientSession(cluster.url) as session:
        for said, code in (("fox " * 60, None), ("fox", ErrorCode.NEVER_FITS)):
            prefill.fail_next = code
            body = {field: [{"role": "user", "content": said}] if field == "messages" else said}
            async with session.post(path, json=body) as response:
                error = (await response.json())["error"]
                assert (response.status, error["param"]) == (400, field), error


async def test_a_model_without_a_template_says_so(start_cluster: StartCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = await start_cluster()
    monkeypatch.setattr(cluster.service.tokenizer, "chat_template", None)
    cluster.decode(transport="none")
    await cluster.until(lambda: most_tokens(cluster.service.pool), "a worker")
    status, body = await post(cluster)
    assert (status, body["error"]["code"]) == (400, "no_chat_template")
    assert "has no chat template; use /v1/completions" in body["error"]["message"]


@pytest.mark.medium
@pytest.mark.parametrize("source", ["{{ 10 ** (10 ** 10) }}", "{{ 'x' * 10 ** 12 }}"], ids=["time", "memory"])
async def test_what_nothing_can_interrupt_costs_the_chat_and_nobody_else(
    cluster: Cluster, client: Client, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    process = cluster.service.reader._chat_process
    told = packed_model(UnpackedModel(cluster.service.tokenizer.info, ChatTemplate(source, {}), ControlTokens(())))
    with monkeypatch.context() as patch:
        patch.setattr(process._helper, "_first", MODEL.pack(len(told)) + told)
        patch.setattr(process, "_deadline_s", 3.0)
        hostile = asyncio.create_task(post(cluster))
        text = await client.completions.create(model="tiny", prompt="the fox", temperature=0)
        assert text.choices[0].text == client.expected("the fox", max_tokens=16)
        status, body = await hostile
        assert (status, body["error"]["code"]) == (400, "chat_template_error")
    await process._helper.end()
    assert (await post(cluster))[0] == 200


@pytest.mark.medium
async def test_a_short_chat_has_the_tokens_of_a_long_one(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = cluster.service.reader
    monkeypatch.setattr(reader._process, "read", counted := Counted(reader._process.read))
    monkeypatch.setattr("router.reading.reader.MAX_WRITTEN_CHARS", len(PROMPT))
    for content in ("say {special} twice", "ends with <", "the fox", "the fox jumps over lazy dogs"):
        said = content.format(special=reader._tokenizer.control_tokens.texts[0])
        data = json.dumps({"messages": [USER | {"content": said}]}).encode()
        num_calls = counted.num_calls
        short = await reader.read([data], MAX_MODEL_LEN, Kind.CHAT)
        assert counted.num_calls - num_calls == (content != "the fox"), content
        long = await reader.read([b" " * NUM_FREE_BYTES + data], MAX_MODEL_LEN, Kind.CHAT)
        assert short.prompts == long.prompts, content


class Counted:
    """A function that notes how often it was called."""

    def __init__(self, inner: Any) -> None:
        self.num_calls = 0
        self._inner = inner

    def __call__(self, *args: Any) -> Any:
        self.num_calls += 1
        return self._inner(*args)


OF_MESSAGES = st.dictionaries(
    st.sampled_from(["role", "content", "tool_calls", "name", "x"]),
    st.one_of(st.none(), st.text(max_size=3), st.sampled_from(["user", "assistant", "tool"]), st.lists(st.text())),
)
VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 130), st.text(max_size=5), st.lists(OF_MESSAGES, max_size=3), OF_MESSAGES
)


@pytest.mark.medium
@settings(max_examples=300)
@given(fields=st.dictionaries(st.sampled_from([*CHAT_FIELDS.fields]), VALUES, max_size=5), talks=st.booleans())
def test_whatever_is_sent_is_a_request_or_an_error_and_packed_it_is_the_same(
    ours: Tokenizer, fields: dict[str, Any], talks: bool
) -> None:
    data = json.dumps(fields | ({"messages": [USER]} if talks else {}) | {"seed": 1}).encode()
    try:
        request = tokenized(parse_conversation(data, ours, 100), ours, 100)
    except RequestError as error:
        assert 400 <= error.status < 500
        json.dumps(error_body(error), ensure_ascii=False).encode()
        with pytest.raises(RequestError) as caught:
            unpack(read(bytearray(data), ours, 100, Kind.CHAT))
        assert vars(caught.value) == vars(error)
    else:
        assert unpack(read(bytearray(data), ours, 100, Kind.CHAT)) == request


THOUGHTS = pytest.mark.parametrize(
    ("end", "thoughts"), [("<think>\n", "have begun"), ("Well.", "may come"), ("<think>\n\n</think>\n\n", "")]
)
"""By the end of a prompt; with the last one templates say that there are none."""


@pytest.mark.parametrize("choice", ["auto", "none"])
@THOUGHTS
def test_how_an_answer_is_taken_apart_follows_from_the_template_and_the_request(
    ours: Tokenizer, monkeypatch: pytest.MonkeyPatch, end: str, thoughts: str, choice: str
) -> None:
    source = "{% if tools %}<tool_call>{% endif %}</think>" + end
    monkeypatch.setattr(ours, "chat_template", ChatTemplate(source, {}))
    tools = [{"type": "function", "function": {"name": "f"}}]
    fields = {"messages": [USER], "tools": tools, "tool_choice": choice, "seed": 1, "include_reasoning": False}
    request = unpack(read(bytearray(json.dumps(fields).encode()), ours, 100, Kind.CHAT))
    assert (request.response.thoughts, request.response.tells_thoughts) == (thoughts, False)
    assert request.response.forced == ()
    assert request.response.tool_format == ("hermes" if choice == "auto" else "")
    (prompt,) = request.prompts
    assert not isinstance(prompt, str)
    assert ours.decode_all(prompt).startswith("<tool_call>") is (choice == "auto")


@THOUGHTS
def test_a_form_is_that_of_what_is_said_behind_thoughts(
    ours: Tokenizer, monkeypatch: pytest.MonkeyPatch, end: str, thoughts: str
) -> None:
    source = "{% if tools %}<tool_call>{% endif %}</think>" + end
    monkeypatch.setattr(ours, "chat_template", ChatTemplate(source, {}))
    tools = [{"type": "function", "function": {"name": "f", "strict": True}}]
    free = [{"type": "function", "function": {"name": "f"}}]
    cases: list[tuple[dict[str, Any], str]] = [
        ({"response_format": {"type": "json_object"}}, "json"),
        ({"guided_choice": ["a"]}, "choice"),
        ({"tools": tools}, "calls"),
        ({"tools": tools, "tool_choice": "required"}, "calls"),
        ({"tools": tools, "tool_choice": "none"}, ""),
        ({"tools": tools, "response_format": {"type": "json_object"}}, "calls"),
        ({"thinking_token_budget": 5}, "regex" if thoughts else ""),
        ({"thinking_token_budget": 5, "tools": tools[:0]}, "regex" if thoughts else ""),
        ({"thinking_token_budget": 5, "tools": free}, "calls" if thoughts else ""),
        ({"thinking_token_budget": -1, "tools": free}, ""),
        ({}, ""),
    ]
    for fields, kind in cases:
        body = {"messages": [USER]} | fields
        grammar = unpack(read(bytearray(json.dumps(body).encode()), ours, 100, Kind.CHAT)).grammar
        assert grammar.kind == kind
        assert grammar.thoughts == (thoughts if kind else "")
        assert grammar.max_thought_tokens == (fields.get("thinking_token_budget") if kind else None)


@pytest.mark.parametrize(
    ("source", "fields", "written"),
    [
        ("{{ reasoning_effort }}", {"reasoning_effort": "high"}, "high"),
        ("{{ enable_thinking }}", {"reasoning_effort": "none"}, "False"),
        ("{{ enable_thinking }}", {"reasoning_effort": "low"}, "True"),
        ("{{ enable_thinking }}", {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": 5}}, "5"),
        ("{{ reasoning_effort is defined }}", {}, "False"),
        ("none", {"reasoning_effort": "none"}, "none"),
    ],
)
def test_effort_reaches_a_template_that_knows_it(
    ours: Tokenizer, monkeypatch: pytest.MonkeyPatch, source: str, fields: dict[str, Any], written: str
) -> None:
    monkeypatch.setattr(ours, "chat_template", ChatTemplate(source, {}))
    request = parse_conversation(json.dumps({"messages": [USER]} | fields).encode(), ours, 100)
    assert request.prompts == [written]
