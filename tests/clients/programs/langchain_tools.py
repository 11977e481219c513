"""Usage: python langchain_tools.py URL MODEL"""

import sys
from typing import Any, Literal

import pydantic
from langchain.agents import create_agent
from langchain.agents.middleware import ModelRequest, wrap_model_call
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

url, model = sys.argv[1:]
shared: dict[str, Any] = {"base_url": f"{url}/v1", "api_key": "none", "model": model, "max_retries": 0}
ASKED = HumanMessage("What light is that?")
called: list[str] = []


@tool
def weather(city: Literal["Verona", "Mantua"]) -> str:
    """The weather of a city."""
    called.append(city)
    return "The sun is up."


class Person(pydantic.BaseModel):
    """Somebody."""

    name: Literal["Romeo", "Juliet"]
    is_dead: bool


@wrap_model_call
def call_first(request: ModelRequest, handler: Any) -> Any:
    """Force a call first, and an answer when it has its output."""
    has_output = any(isinstance(message, ToolMessage) for message in request.messages)
    settings = request.model_settings | {"parallel_tool_calls": False, "strict": True}
    return handler(request.override(tool_choice="none" if has_output else "required", model_settings=settings))


for is_new in (False, True):
    llm = ChatOpenAI(max_tokens=240, temperature=0, use_responses_api=is_new, **shared)
    forced = llm.bind_tools([weather], tool_choice="weather", strict=True, parallel_tool_calls=False)
    whole = forced.invoke([ASKED])
    assert isinstance(whole, AIMessage)
    chunks = list(forced.stream([ASKED]))
    assert sum(bool(chunk.tool_call_chunks) for chunk in chunks) > 2, "arguments come as they are written"
    built: Any = chunks[0]
    for chunk in chunks[1:]:
        built += chunk
    assert [call["args"] for call in built.tool_calls] == [call["args"] for call in whole.tool_calls]
    for answer in (whole, built):
        outputs = [weather.invoke(call) for call in answer.tool_calls]
        last = llm.invoke([ASKED, answer, *outputs])
        assert len(outputs) == 1 and last.text
    assert called == ["Verona"] * 2 or called == ["Mantua"] * 2, called
    called.clear()
    agent: Any = create_agent(llm, [weather], middleware=[call_first])
    messages = agent.invoke({"messages": [ASKED]})["messages"]
    assert [message.type for message in messages] == ["human", "ai", "tool", "ai"] and len(called) == 1
    kinds = {type(message).__name__ for message, _ in agent.stream({"messages": [ASKED]}, stream_mode="messages")}
    assert kinds == {"AIMessageChunk", "ToolMessage"}, kinds
    called.clear()
    for method in ("json_schema", "function_calling"):
        person = llm.with_structured_output(Person, method=method, strict=True).invoke([ASKED])
        assert isinstance(person, Person), person
print("functions called and answered, an agent, objects of a class, streams equal to the whole, of chats and responses")
