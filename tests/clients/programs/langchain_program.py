"""Usage: python langchain_program.py URL MODEL"""

import asyncio
import sys

from langchain_openai import OpenAI

url, model = sys.argv[1:]
llm = OpenAI(base_url=f"{url}/v1", api_key="none", model=model, max_tokens=16, temperature=0, max_retries=0)
whole = llm.invoke("ROMEO:")
assert whole and "".join(llm.stream("ROMEO:")) == whole
assert llm.batch(["ROMEO:", "JULIET:"])[0] == whole
assert "," not in llm.invoke("ROMEO:", stop=[",", ";", "\n\n", ".", "!"])


async def streamed() -> str:
    return "".join([chunk async for chunk in llm.astream("ROMEO:")])


assert asyncio.run(streamed()) == whole
several = OpenAI(base_url=f"{url}/v1", api_key="none", model=model, max_tokens=8, n=2, best_of=2, seed=3, top_p=0.9)
first, second = (several.generate(["ROMEO:"]) for _ in range(2))
assert len(first.generations[0]) == 2
assert first.generations == second.generations, "the seed is the same"
scored = llm.generate(["ROMEO:"], logprobs=2).generations[0][0]
assert "".join(scored.generation_info["logprobs"]["tokens"]) == whole
print("as it should be, streams equal to the whole, texts with a seed equal")
