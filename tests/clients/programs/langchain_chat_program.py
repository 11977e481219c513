"""Usage: python langchain_chat_program.py URL MODEL"""

import asyncio
import sys
from typing import Any

from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI

url, model = sys.argv[1:]
fields: dict[str, Any] = {"base_url": f"{url}/v1", "api_key": "none", "model": model, "max_retries": 0}
llm = ChatOpenAI(max_tokens=16, temperature=0, stream_usage=True, **fields)
asked = [SystemMessage("A garden."), HumanMessage("What light is that?")]
whole = llm.invoke(asked)
assert isinstance(whole, AIMessage) and whole.content and whole.usage_metadata
chunks = list(llm.stream(asked))
assert "".join(chunk.text for chunk in chunks) == whole.content
[usage] = [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata]
assert usage["total_tokens"] == whole.usage_metadata["total_tokens"]
assert [answer.content for answer in llm.batch([asked, asked])] == [whole.content] * 2
assert "," not in llm.invoke([*asked, whole, HumanMessage("Who speaks?")], stop=[",", "."]).content


async def streamed() -> str:
    return "".join([chunk.text async for chunk in llm.astream(asked)])


assert asyncio.run(streamed()) == whole.content
several = ChatOpenAI(max_tokens=8, n=2, seed=3, top_p=0.9, **fields)
first, second = (several.generate([asked]) for _ in range(2))
texts = [[each.text for each in result.generations[0]] for result in (first, second)]
assert len(texts[0]) == 2 and texts[0] == texts[1], "the seed is the same"
scored = llm.invoke(asked, logprobs=True, top_logprobs=2)
assert "".join(token["token"] for token in scored.response_metadata["logprobs"]["content"]) == whole.content
print("as it should be, streams equal to the whole, texts with a seed equal")
