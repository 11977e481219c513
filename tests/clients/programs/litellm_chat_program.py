"""Usage: python litellm_chat_program.py URL MODEL"""

import asyncio
import os
import sys
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would fetch one
import litellm

url, model = sys.argv[1:]
asked = [{"role": "system", "content": "A garden."}, {"role": "user", "content": "What light is that?"}]
fields: dict[str, Any] = {
    "api_base": f"{url}/v1", "api_key": "none", "messages": asked, "max_tokens": 16, "temperature": 0
}  # fmt: skip
texts = []
for provider in ("openai", "hosted_vllm"):
    named = {"model": f"{provider}/{model}", **fields}
    texts.append(litellm.completion(**named).choices[0].message.content)
    chunks = litellm.completion(stream=True, **named)
    texts.append("".join(chunk.choices[0].delta.content or "" for chunk in chunks))
    choices = asyncio.run(litellm.acompletion(**named, n=2, stop=[","])).choices
    assert len(choices) == 2 and not any("," in choice.message.content for choice in choices)
assert texts[0] and len(set(texts)) == 1, texts
try:
    litellm.completion(model=f"openai/{model}", **{**fields, "messages": [{"role": "user", "content": "a" * 100_000}]})
except litellm.ContextWindowExceededError as error:
    assert "context" in str(error) or "template" in str(error)
except litellm.BadRequestError as error:
    assert "template" in str(error), error
else:
    raise AssertionError("a chat that is too long was not refused")
print("as it should be, streams equal to the whole")
