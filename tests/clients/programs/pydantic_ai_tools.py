"""Usage: python pydantic_ai_tools.py URL MODEL"""

import asyncio
import sys
from typing import Any, Literal

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, RunContext, ToolDefinition, ToolOutput
from pydantic_ai.capabilities import PrepareOutputTools
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

url, name = sys.argv[1:]
provider = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
ASKED = "What light is that?"


class Person(BaseModel):
    name: Literal["Romeo", "Juliet"]
    is_dead: bool


async def once(context: RunContext[None], definition: ToolDefinition) -> ToolDefinition | None:
    """Offer the tool until it has been called: then only the one for the object is left."""
    parts = [part for message in context.messages for part in message.parts]
    return None if any(part.part_kind == "tool-return" for part in parts) else definition


async def first_only(context: RunContext[None], definition: list[ToolDefinition]) -> list[ToolDefinition]:
    """Offer the tool for the object only once the other has been called."""
    parts = [part for message in context.messages for part in message.parts]
    return definition if any(part.part_kind == "tool-return" for part in parts) else []


def weather(city: Literal["Verona", "Mantua"]) -> str:
    """The weather of a city."""
    called.append(city)
    return "The sun is up."


called: list[str] = []


async def talk(model: OpenAIChatModel | OpenAIResponsesModel) -> None:
    settings: Any = {"temperature": 0, "parallel_tool_calls": False, "max_tokens": 240}
    agent: Agent[None, Person] = Agent(
        model, output_type=ToolOutput(Person), instructions="Be brief.", model_settings=settings,
        capabilities=[PrepareOutputTools(first_only)],
    )  # fmt: skip
    agent.tool_plain(prepare=once)(weather)
    result = await agent.run(ASKED)
    assert isinstance(result.output, Person) and len(called) == 1, (result.output, called)
    again = await agent.run("And now?", message_history=result.all_messages())
    assert isinstance(again.output, Person)
    async with agent.run_stream(ASKED) as stream:
        assert await stream.get_output() == result.output
    native: Agent[None, Person] = Agent(model, output_type=NativeOutput(Person), model_settings=settings)
    assert isinstance((await native.run(ASKED)).output, Person)
    plain: Agent[None, str] = Agent(model, model_settings=settings | {"max_tokens": 16})
    async with plain.run_stream(ASKED) as stream:
        text = "".join([part async for part in stream.stream_text(delta=True)])
    assert text and text == (await plain.run(ASKED)).output
    called.clear()


for model in (OpenAIChatModel(name, provider=provider), OpenAIResponsesModel(name, provider=provider)):
    asyncio.run(talk(model))
print("agents that call a function and give an object, streams equal to the whole, of chats and responses")
