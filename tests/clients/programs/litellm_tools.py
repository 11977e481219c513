"""Usage: python litellm_tools.py URL MODEL"""

import json
import os
import sys
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would fetch one
import litellm

url, model = sys.argv[1:]
CITIES = ("Verona", "Mantua")
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": list(CITIES)}},
    "required": ["city"],
    "additionalProperties": False,
    "maxProperties": 1,  # of what this package leaves of it for hosted_vllm
}
NAMED = {"name": "weather", "description": "The weather of a city.", "parameters": PARAMETERS}
asked: dict[str, Any] = {"role": "user", "content": "What light is that?"}
fields: dict[str, Any] = {"api_base": f"{url}/v1", "api_key": "none", "temperature": 0}


def output_of(arguments: str) -> str:
    assert json.loads(arguments)["city"] in CITIES
    return "The sun is up."


def chat_loop(named: dict[str, Any]) -> None:
    """Send the answer back as an object, dumped, and built of the chunks of a stream."""
    forced: dict[str, Any] = named | {
        "messages": [asked], "tools": [{"type": "function", "function": NAMED}], "tool_choice": "required",
        "parallel_tool_calls": False, "max_tokens": 120,
    }  # fmt: skip
    whole = litellm.completion(**forced)
    assert whole.choices[0].finish_reason == "tool_calls", whole
    built = litellm.stream_chunk_builder(list(litellm.completion(stream=True, **forced)))
    for message in (whole.choices[0].message, whole.choices[0].message.model_dump(), built.choices[0].message):
        conversation = [asked, message]
        for call in message["tool_calls"]:
            content = output_of(call["function"]["arguments"])
            conversation.append({"role": "tool", "tool_call_id": call["id"], "content": content})
        answer = litellm.completion(messages=conversation, stop=["\n\n"], **named)
        assert answer.choices[0].finish_reason == "stop" and answer.choices[0].message.content


def response_loop(named: dict[str, Any]) -> None:
    """Send items back."""
    forced: dict[str, Any] = named | {
        "input": [asked], "tools": [{"type": "function", **NAMED, "strict": True}], "tool_choice": "required",
        "parallel_tool_calls": False, "max_output_tokens": 120,
    }  # fmt: skip
    response = litellm.responses(**forced)
    conversation: list[Any] = [asked]
    for item in response.output:
        conversation.append(item.model_dump(exclude_none=True))
        conversation.append(
            {"type": "function_call_output", "call_id": item.call_id, "output": output_of(item.arguments)}
        )
    last = litellm.responses(input=conversation, max_output_tokens=16, **named)
    assert last.output[0].content[0].text
    kinds = [event.type for event in litellm.responses(stream=True, **forced)]
    assert "response.function_call_arguments.delta" in kinds and kinds[-1] == "response.completed"


for provider in ("openai", "hosted_vllm"):
    chat_loop({"model": f"{provider}/{model}", **fields})
response_loop({"model": f"openai/{model}", **fields})
print("functions called and answered, whole and streamed")
