"""Calls forced in the formats of other families, through the whole path, as openai's client puts them together."""

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from router.text.formats.parts import is_short_id
from tests.e2e.system import System
from tests.support.guided import is_valid
from tests.support.marked_model import write_marked_model
from tests.support.marks import first_then

TEMPLATES = {
    "gpt-oss": "'<|start|>assistant<|channel|>commentary to=functions.' + call.function.name + '<|message|>' +"
    " call.function.arguments | tojson + '<|end|>'",
    "gemma": "'<|tool_call>call:' + call.function.name + '{}<tool_call|>'",
    "mistral": "'[TOOL_CALLS]' + call.function.name + '[CALL_ID]' + call.id + '[ARGS]' +"
    " call.function.arguments | tojson",
}
"""Expressions that write a call of a conversation, by family."""
ENDS = {"gpt-oss": "<|start|>assistant"}
SCHEMA = {
    "type": "object",
    "properties": {
        "whom": {"enum": ["Juliet", "Tybalt, the cat"]}, "times": {"type": "integer", "minimum": 0, "maximum": 99},
        "why": {"type": "string", "maxLength": 9}, "often": {"type": "boolean"},
    },
    "required": ["whom", "times", "why"],
    "additionalProperties": False,
}  # fmt: skip
TOOLS: list[Any] = [{"type": "function", "function": {"name": "kiss", "parameters": SCHEMA, "strict": True}}]


@pytest.mark.medium
@pytest.mark.parametrize("family", first_then(pytest.mark.slow, ["gemma", "gpt-oss", "mistral"]))
async def test_forced_calls_are_valid_and_the_same_whole_and_streamed(family: str, tmp_path: Path) -> None:
    call = f"{{% for call in message.tool_calls or [] %}}{{{{ {TEMPLATES[family]} }}}}{{% endfor %}}"
    turns = f"{{% for message in messages %}}{{{{ message.role + ': ' + message.content }}}}{call}{{% endfor %}}"
    write_marked_model(tmp_path, f"{{{{ tools | tojson if tools }}}}{turns}{ENDS.get(family, '')}")
    asked: Any = {"role": "user", "content": "Act."}
    fields: dict[str, Any] = {"model": "m", "tools": TOOLS, "max_tokens": 300, "temperature": 0, "seed": 1}
    fields["extra_body"] = {"thinking_token_budget": 8}
    forced = fields | {"messages": [asked], "tool_choice": "required", "parallel_tool_calls": False}
    with System(tmp_path) as system:
        system.start()
        async with openai.AsyncOpenAI(base_url=f"{system.url}/v1", api_key="none", max_retries=0) as client:
            whole = (await client.chat.completions.create(**forced)).choices[0]
            async with client.chat.completions.stream(**forced) as stream:
                kinds = [event.type async for event in stream]
                streamed = (await stream.get_final_completion()).choices[0]
            choices: list[Any] = [whole, streamed]
            calls = [each.message.tool_calls[0].function for each in choices]
            assert calls[0].arguments == calls[1].arguments and is_valid(calls[0].arguments, SCHEMA)
            assert kinds.count("tool_calls.function.arguments.delta") > 2
            assert {each.finish_reason for each in choices} == {"tool_calls"}
            assert [each.message.content for each in choices] == [None, ""]
            (called,) = whole.message.tool_calls
            assert is_short_id(called.id) is (family == "mistral")
            result: Any = {"role": "tool", "tool_call_id": called.id, "content": json.dumps("Done.")}
            conversation: Any = [asked, whole.message, result]
            told = fields | {"messages": conversation, "tool_choice": "none", "max_tokens": 30}
            answer = await client.chat.completions.create(**told)
            assert answer.choices[0].finish_reason in ("stop", "length")
