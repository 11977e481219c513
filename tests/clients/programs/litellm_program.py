"""Usage: python litellm_program.py URL MODEL"""

import asyncio
import os
import sys
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would fetch one
import litellm

url, model = sys.argv[1:]
fields: dict[str, Any] = {
    "api_base": f"{url}/v1", "api_key": "none", "prompt": "ROMEO:", "max_tokens": 16, "temperature": 0
}  # fmt: skip
texts = []
for provider in ("text-completion-openai", "hosted_vllm"):
    named = {"model": f"{provider}/{model}", **fields}
    texts.append(litellm.text_completion(**named).choices[0].text)
    chunks = litellm.text_completion(stream=True, **named)
    texts.append("".join(chunk.choices[0].text or "" for chunk in chunks))
    several = {**named, "prompt": ["ROMEO:", "JULIET:"], "n": 2, "stop": [","]}
    choices = asyncio.run(litellm.atext_completion(**several)).choices
    assert len(choices) == 4 and not any("," in choice.text for choice in choices)
assert texts[0] and len(set(texts)) == 1, texts
try:
    litellm.text_completion(model=f"text-completion-openai/{model}", suffix="x", **fields)
except litellm.BadRequestError as error:
    assert "suffix" in str(error)
else:
    raise AssertionError("suffix was not refused")
print("as it should be, streams equal to the whole")
