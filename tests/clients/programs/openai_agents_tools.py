"""Usage: python openai_agents_tools.py URL MODEL"""

import asyncio
import sys
from typing import Any, Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from openai.types.shared import Reasoning
from pydantic import BaseModel

url, name = sys.argv[1:]
set_tracing_disabled(True)
ASKED = "What light is that?"
called: list[str] = []


class Person(BaseModel):
    name: Literal["Romeo", "Juliet"]
    is_dead: bool


@function_tool
def weather(city: Literal["Verona", "Mantua"]) -> str:
    """The weather of a city."""
    called.append(city)
    return "The sun is up."


def settings(**fields: Any) -> ModelSettings:
    return ModelSettings(temperature=0, max_tokens=240, parallel_tool_calls=False, **fields)


async def talk(model: OpenAIChatCompletionsModel | OpenAIResponsesModel) -> None:
    """Have agents call a function, answer, give an object, hand over, and go on with what was said."""
    until_empty_line: dict[str, Any] = {"extra_body": {"stop": ["\n\n"]}}
    caller = Agent(
        name="caller", instructions="Be brief.", model=model, tools=[weather],
        model_settings=settings(
            tool_choice="required", reasoning=Reasoning(effort="low", summary="auto"), verbosity="low", store=False,
            metadata={"garden": "Capulet"}, **until_empty_line,
        ),
    )  # fmt: skip
    result = await Runner.run(caller, ASKED)
    kinds = [type(item).__name__ for item in result.new_items]
    assert kinds == ["ToolCallItem", "ToolCallOutputItem", "MessageOutputItem"], kinds
    assert result.final_output and len(called) == 1
    assert result.context_wrapper.usage.requests == 2 and result.context_wrapper.usage.output_tokens > 2
    again = await Runner.run(caller, [*result.to_input_list(), {"role": "user", "content": "And now?"}])
    assert again.final_output and len(called) == 2
    streamed = Runner.run_streamed(caller, ASKED)
    deltas = [
        event.data.delta
        async for event in streamed.stream_events()
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
    ]
    assert "".join(deltas) == streamed.final_output == result.final_output
    typed = Agent(name="typed", model=model, output_type=Person, model_settings=settings())
    person = (await Runner.run(typed, ASKED)).final_output
    assert isinstance(person, Person)
    both = Agent(
        name="both", model=model, output_type=Person, tools=[weather], tool_use_behavior="stop_on_first_tool",
        model_settings=settings(tool_choice="weather"),
    )  # fmt: skip
    await Runner.run(both, ASKED)
    assert len(called) == 4, "a call is forced of an agent that gives an object"
    clerk = Agent(name="clerk", model=model, handoffs=[typed], model_settings=settings(tool_choice="required"))
    handed = await Runner.run(clerk, ASKED)
    assert handed.last_agent is typed and isinstance(handed.final_output, Person)
    called.clear()


async def main() -> None:
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    await talk(OpenAIResponsesModel(model=name, openai_client=client))
    await talk(OpenAIChatCompletionsModel(model=name, openai_client=client))


asyncio.run(main())
print(
    "functions called and answered, objects of a class, a handoff, streams equal to the whole, of responses and chats"
)
