"""Usage: python instructor_tools.py URL MODEL"""

import sys
from typing import Any, Literal

import instructor
import pydantic
from openai import OpenAI

url, model = sys.argv[1:]
client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
ASKED: dict[str, Any] = {"role": "user", "content": "Who is there?"}


class Person(pydantic.BaseModel):
    """Somebody."""

    model_config = pydantic.ConfigDict(extra="forbid")

    name: Literal["Romeo", "Juliet"]
    is_dead: bool


class Refused(Person):
    """A person who is wrong at first, so that the library asks again."""

    @pydantic.field_validator("name")
    @classmethod
    def wait(cls, name: str) -> str:
        refused.append(name)
        if len(refused) % 2:
            raise ValueError("not now")
        return name


refused: list[str] = []
MODES = [
    instructor.Mode.TOOLS,
    instructor.Mode.TOOLS_STRICT,
    instructor.Mode.JSON_SCHEMA,
    instructor.Mode.RESPONSES_TOOLS,
]
for mode in MODES:
    asking = instructor.from_openai(client, mode=mode)
    is_new = mode is instructor.Mode.RESPONSES_TOOLS
    limit = {"max_output_tokens" if is_new else "max_tokens": 240}
    fields: dict[str, Any] = {"model": model, "temperature": 0, "messages": [ASKED], **limit}
    create = asking.chat.completions
    person, answer = create.create_with_completion(response_model=Person, max_retries=0, **fields)
    assert isinstance(person, Person) and answer is not None, (mode, person)
    partial = list(create.create_partial(response_model=Person, max_retries=0, **fields))
    assert partial[-1].model_dump() == person.model_dump(), (mode, partial[-1])
    assert isinstance(create.create(response_model=Refused, max_retries=2, **fields), Refused)
assert refused and len(refused) % 2 == 0
print("objects of a class, asked for again where they are refused, streamed in parts equal to the whole")
