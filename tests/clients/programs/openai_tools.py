"""Usage: python openai_tools.py URL MODEL"""

import asyncio
import json
import sys
from typing import Any, Literal

import openai
import pydantic
from openai import AsyncOpenAI, OpenAI

url, model = sys.argv[1:]
client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
CITIES = ("Verona", "Mantua")
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": list(CITIES)}},
    "required": ["city"],
    "additionalProperties": False,
}
NAMED = {"name": "weather", "description": "The weather of a city.", "parameters": PARAMETERS, "strict": True}


class Weather(pydantic.BaseModel):
    """The weather of a city."""

    city: Literal["Verona", "Mantua"]


class Person(pydantic.BaseModel):
    name: Literal["Romeo", "Juliet"]
    is_dead: bool


def output_of(arguments: str) -> str:
    """The output of the function, once it has been called as it wants."""
    assert json.loads(arguments)["city"] in CITIES
    return "The sun is up."


def chat_loops() -> None:
    """Call a function and send its output, with the answer in each form in which the package has it."""
    tools: list[Any] = [{"type": "function", "function": NAMED}]
    asked: Any = {"role": "user", "content": "What light is that?"}
    fields: dict[str, Any] = {"model": model, "temperature": 0, "max_completion_tokens": 120}
    forced: dict[str, Any] = fields | {"messages": [asked], "tools": tools, "tool_choice": "required"}
    with client.chat.completions.stream(parallel_tool_calls=False, **forced) as stream:
        streamed = stream.get_final_completion().choices[0].message
    parsed: Any = client.chat.completions.parse(
        **forced | {"tools": [openai.pydantic_function_tool(Weather)]}, parallel_tool_calls=False
    )
    assert isinstance(parsed.choices[0].message.tool_calls[0].function.parsed_arguments, Weather)
    plain = client.chat.completions.create(parallel_tool_calls=False, **forced).choices[0]
    assert plain.finish_reason == "tool_calls"
    said: list[Any] = [plain.message, plain.message.model_dump(), streamed, parsed.choices[0].message]
    for message in said:
        calls = message["tool_calls"] if isinstance(message, dict) else message.to_dict()["tool_calls"]
        outputs = [
            {"role": "tool", "tool_call_id": call["id"], "content": output_of(call["function"]["arguments"])}
            for call in calls
        ]
        conversation: list[Any] = [asked, message, *outputs]
        answer = client.chat.completions.create(messages=conversation, stop=["\n\n"], **fields).choices[0]
        assert answer.finish_reason == "stop" and answer.message.content
    person = client.chat.completions.parse(messages=[asked], response_format=Person, **fields)
    assert isinstance(person.choices[0].message.parsed, Person)


def response_loops() -> None:
    """Do the same with items, whole, streamed and parsed."""
    asked: Any = {"role": "user", "content": "What light is that?"}
    fields: dict[str, Any] = {"model": model, "temperature": 0, "max_output_tokens": 120, "store": False}
    forced: dict[str, Any] = fields | {
        "input": [asked], "tools": [{"type": "function", **NAMED}], "tool_choice": "required",
        "parallel_tool_calls": False, "include": ["reasoning.encrypted_content"],
    }  # fmt: skip
    with client.responses.stream(**forced) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_response()
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
    assert "response.function_call_arguments.delta" in kinds
    called = [client.responses.create(**forced), streamed, client.responses.parse(**forced)]
    for response in called:
        conversation: list[Any] = [asked, *response.output]
        for item in response.output:
            assert item.type == "function_call"
            conversation.append(
                {"type": "function_call_output", "call_id": item.call_id, "output": output_of(item.arguments)}
            )
        last = client.responses.create(input=conversation, extra_body={"stop": ["\n\n"]}, **fields)
        assert last.status == "completed" and last.output_text
    person = client.responses.parse(input="Who?", text_format=Person, **fields)
    assert isinstance(person.output_parsed, Person)
    with client.responses.stream(input="Who?", text_format=Person, **fields) as stream:
        assert stream.get_final_response().output_parsed == person.output_parsed
    try:
        client.responses.create(model=model, input="x", previous_response_id=called[0].id)
    except openai.BadRequestError as error:
        assert error.param == "previous_response_id"
    else:
        raise AssertionError("nothing is stored")


async def without_blocking() -> None:
    """See that the client that does not block streams what the other one gets."""
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as waiting:
        fields: dict[str, Any] = {"model": model, "input": "Who?", "temperature": 0, "max_output_tokens": 16}
        whole = await waiting.responses.create(**fields)
        stream = await waiting.responses.create(stream=True, **fields)
        deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
        assert "".join(deltas) == whole.output_text


chat_loops()
response_loops()
asyncio.run(without_blocking())
print("functions called and answered, objects of a class, streams equal to the whole")
