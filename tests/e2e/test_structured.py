"""Texts that are held to a form, through the whole path: each is valid, whoever dies, and nobody else notices."""

import asyncio
import random
import re
from collections.abc import Iterator
from typing import Any, Literal

import aiohttp
import openai
import pydantic
import pytest

from tests.e2e.client import Completion, complete
from tests.e2e.held_system import HeldSystem
from tests.e2e.schemas import PROMPT, asked, complete_schemas
from tests.e2e.system import System
from tests.support.guided import DEMO_MODEL, is_valid, random_root

pytestmark = pytest.mark.medium

NUM_SCHEMAS = 16


@pytest.fixture(scope="module")
def system() -> Iterator[HeldSystem]:
    with HeldSystem(DEMO_MODEL, "--kv-pool-bytes", str(24 << 20)) as system:
        yield system.start(prefill=1, decode=2)


async def post(url: str, body: dict[str, Any], path: str = "/v1/completions") -> dict[str, Any]:
    async with aiohttp.ClientSession() as session, session.post(url + path, json=body) as response:
        answer: dict[str, Any] = await response.json()
        assert response.status == 200, answer
        return answer


async def free_texts(url: str) -> list[str]:
    async with aiohttp.ClientSession() as session:
        streams = (
            complete(session, url, f"{PROMPT}{i}", temperature=0.8, seed=i, max_tokens=40, stop=["\n\n"])
            for i in range(4)
        )
        return [completion.text for completion in await asyncio.gather(*streams)]


async def test_random_schemas_give_valid_texts_and_neighbours_write_what_they_would_alone(system: System) -> None:
    schemas = [random_root(random.Random(seed)) for seed in range(NUM_SCHEMAS)]
    alone = await free_texts(system.url)
    completions = [Completion() for _ in schemas]
    _, *among_others = await asyncio.gather(
        complete_schemas(system.url, schemas, completions), free_texts(system.url), free_texts(system.url)
    )
    assert among_others == [alone, alone]
    for schema, completion in zip(schemas, completions, strict=True):
        assert completion.error is None and completion.finish_reason in ("stop", "length"), completion
        if completion.finish_reason == "stop":
            assert is_valid(completion.text, schema), (completion.text, schema)
    assert sum(completion.finish_reason == "stop" for completion in completions) > NUM_SCHEMAS // 3
    system.until(system.all_blocks_free)


async def test_chats_give_valid_texts_too(system: System) -> None:
    schemas = [random_root(random.Random(1000 + seed)) for seed in range(4)]
    bodies = (
        {"messages": [{"role": "user", "content": "Speak."}], "n": 2, **asked(schema, seed)}
        for seed, schema in enumerate(schemas)
    )
    answers = await asyncio.gather(*(post(system.url, body, "/v1/chat/completions") for body in bodies))
    for schema, answer in zip(schemas, answers, strict=True):
        for choice in answer["choices"]:
            text, reason = choice["message"]["content"], choice["finish_reason"]
            assert reason == "length" or is_valid(text, schema), (text, schema)


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"structured_outputs": {"regex": r"[A-Z][a-zü]{2,9}/\d{3}\n?"}}, r"[A-Z][a-zü]{2,9}/\d{3}\n?"),
        ({"guided_regex": "(ab|cd)+e"}, "(ab|cd)+e"),
        ({"guided_choice": ["yes", "yes, sir", 'no\n"你好"']}, 'yes|yes, sir|no\n"你好"'),
        (
            {"structured_outputs": {"grammar": 'root ::= "<" word ">" word?\nword ::= [a-c] [x-z]?'}},
            "<[a-c][x-z]?>([a-c][x-z]?)?",
        ),
        (
            {"structured_outputs": {"grammar": 'start: "x" NUM ("," NUM)~1..3\nNUM: /[0-9]{1,4}/'}},
            r"x\d{1,4}(,\d{1,4}){1,3}",
        ),
    ],
)
async def test_other_forms(system: System, form: dict[str, Any], pattern: str) -> None:
    answers = await asyncio.gather(
        *(
            post(system.url, {"prompt": PROMPT, "temperature": 1.2, "seed": seed, "max_tokens": 200, "n": 2, **form})
            for seed in range(4)
        )
    )
    choices = [choice for answer in answers for choice in answer["choices"]]
    ended = [choice["text"] for choice in choices if choice["finish_reason"] == "stop"]
    assert len(ended) >= len(choices) // 2
    assert all(re.fullmatch(pattern, text) for text in ended), ended


async def test_what_else_a_request_asks_for_goes_with_a_form(system: System) -> None:
    def text(answer: dict[str, Any]) -> tuple[str, str]:
        return answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]

    letters = {"prompt": PROMPT, "guided_regex": "[ab]+", "temperature": 0, "max_tokens": 12}
    cut, until_b = await post(system.url, letters), await post(system.url, {**letters, "stop": ["b"], "logit_bias": {}})
    assert text(cut)[1] == "length" and set(text(cut)[0]) <= {"a", "b"}
    assert text(until_b)[0] == text(cut)[0].partition("b")[0]
    ids = (await post(system.url, {"prompt": "b", "add_special_tokens": False}, "/tokenize"))["tokens"]
    biased = await post(system.url, {**letters, "logit_bias": {str(ids[0]): 100}})
    assert text(biased) == ("b" * 12, "length")
    only = await post(system.url, {**letters, "allowed_token_ids": ids, "presence_penalty": 2.0, "ignore_eos": True})
    assert text(only) == ("b" * 12, "length")
    scored = await post(system.url, {**letters, "logprobs": 2})
    assert len(scored["choices"][0]["logprobs"]["tokens"]) == scored["usage"]["completion_tokens"]
    done = await post(system.url, {"prompt": PROMPT, "guided_choice": ["done"], "ignore_eos": True, "min_tokens": 16})
    assert text(done) == ("done", "stop"), "nothing follows"
    late = await post(system.url, {"prompt": PROMPT, "guided_regex": "x*", "min_tokens": 9, "logit_bias": {"0": 100}})
    assert len(text(late)[0]) >= 9 and late["usage"]["completion_tokens"] <= 11


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=12)
    age: int = pydantic.Field(ge=0, le=150)
    houses: list[Literal["Montague", "Capulet"]] = pydantic.Field(max_length=2)


async def test_openais_client_gets_objects_of_a_class(system: System) -> None:
    async with openai.AsyncOpenAI(base_url=f"{system.url}/v1", api_key="none", max_retries=0) as client:
        completions = (
            client.chat.completions.parse(
                model="m",
                messages=[{"role": "user", "content": "Who is there?"}],
                response_format=Person,
                max_tokens=800,
                seed=seed,
            )
            for seed in range(3)
        )
        for completion in await asyncio.gather(*completions):
            assert isinstance(completion.choices[0].message.parsed, Person)
        response = await client.responses.parse(
            model="m", input="Who is there?", text_format=Person, max_output_tokens=800, extra_body={"seed": 0}
        )
        assert isinstance(response.output_parsed, Person)


async def test_a_form_that_no_token_fits_ends_with_its_reason(system: System) -> None:
    body = {"prompt": PROMPT, "guided_choice": ["no"], "allowed_token_ids": [5, 6]}
    async with aiohttp.ClientSession() as session, session.post(system.url + "/v1/completions", json=body) as response:
        answer = await response.json()
    assert response.status == 400 and answer["error"]["code"] == "grammar_dead_end"


@pytest.mark.slow
async def test_grammars_go_on_where_they_were_when_workers_die(system: HeldSystem) -> None:
    schemas = [random_root(random.Random(2000 + seed)) for seed in range(8)]
    undisturbed, disturbed = [Completion() for _ in schemas], [Completion() for _ in schemas]
    await complete_schemas(system.url, schemas, undisturbed)
    lengths = [completion.num_tokens for completion in undisturbed]
    running = asyncio.create_task(complete_schemas(system.url, schemas, disturbed))
    for name, num_tokens in (("decode-0", 8), ("prefill-0", 20), ("decode-1", 33)):
        system.holds.texts.set(num_tokens)
        while any(now.num_tokens < min(num_tokens, end) for now, end in zip(disturbed, lengths, strict=True)):
            await asyncio.sleep(0.005)
            assert not running.done(), f"it was over too soon: {lengths}"
        system.kill(name)
        system.start_worker(name)
    system.release()
    await running
    assert [completion.error for completion in disturbed] == [None] * len(schemas)
    assert [completion.text for completion in disturbed] == [completion.text for completion in undisturbed]
    assert "replayed after" in system.log("router")


@pytest.mark.slow
async def test_prompts_that_a_decode_worker_computes_are_held_to_a_form_too() -> None:
    schemas = [random_root(random.Random(3000 + seed)) for seed in range(6)]
    with System(DEMO_MODEL, "--kv-transport", "none") as system:
        system.start(prefill=0, decode=1)
        completions = [Completion() for _ in schemas]
        await complete_schemas(system.url, schemas, completions)
        for schema, completion in zip(schemas, completions, strict=True):
            assert completion.error is None
            assert completion.finish_reason == "length" or is_valid(completion.text, schema)
        system.until(system.all_blocks_free)


@pytest.mark.slow
async def test_chats_call_tools_with_valid_arguments() -> None:
    whom = {"properties": {"whom": {"enum": ["Juliet", "Tybalt, the cat"]}}, "required": ["whom"]}
    times = {"properties": {"times": {"type": "integer", "minimum": -9, "maximum": 99}}, "required": ["times"]}
    schemas = {
        name: {"type": "object", "additionalProperties": False, **schema}
        for name, schema in {"kiss": whom, "sigh": times}.items()
    }
    tools = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in schemas.items()]
    messages: list[Any] = [{"role": "user", "content": "Act."}]
    body = {"messages": messages, "tools": tools, "max_tokens": 400, "seed": 3, "n": 4}
    named = {"type": "function", "function": {"name": "kiss"}}
    with System(DEMO_MODEL) as system:
        system.start()
        for fields in ({"tool_choice": named}, {"tool_choice": "required", "parallel_tool_calls": False}):
            answer = await post(system.url, body | fields, "/v1/chat/completions")
            for choice in answer["choices"]:
                assert choice["finish_reason"] == "tool_calls", choice
                (call,) = choice["message"]["tool_calls"]
                name = call["function"]["name"]
                assert is_valid(call["function"]["arguments"], schemas[name])
                assert name == "kiss" or fields["tool_choice"] == "required"
        result = {"role": "tool", "tool_call_id": call["id"], "content": "Done."}
        history = {"messages": [*messages, choice["message"], result]}
        answer = await post(system.url, body | history | {"max_tokens": 40}, "/v1/chat/completions")
        assert all(choice["message"]["content"] for choice in answer["choices"])
        cut = {"tool_choice": named, "max_tokens": 8}
        for choice in (await post(system.url, body | cut, "/v1/chat/completions"))["choices"]:
            (call,) = choice["message"]["tool_calls"]
            assert (choice["finish_reason"], choice["message"]["content"]) == ("length", None)
            assert call["function"]["name"] == "kiss"
        await call_and_answer(system.url, schemas["kiss"])


async def call_and_answer(url: str, schema: dict[str, Any]) -> None:
    """See a function called in a stream of items, and what is said once its output is there."""
    tool: Any = {"type": "function", "name": "kiss", "parameters": schema, "strict": True}
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        fields: dict[str, Any] = {"model": "m", "tools": [tool], "max_output_tokens": 400, "temperature": 0}
        async with client.responses.stream(
            input="Act.", tool_choice="required", parallel_tool_calls=False, **fields
        ) as stream:
            called: list[Any] = [*(await stream.get_final_response()).output]
        assert called and all(isinstance(call.parsed_arguments, dict) for call in called)
        outputs = [{"type": "function_call_output", "call_id": call.call_id, "output": "Done."} for call in called]
        conversation: Any = [{"role": "user", "content": "Act."}, *called, *outputs]
        response = await client.responses.create(
            input=conversation, tool_choice="none", extra_body={"stop": ["\n"], "min_tokens": 1}, **fields
        )
        assert response.output[0].type == "message"
