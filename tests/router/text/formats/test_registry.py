"""The format of a model's answers follows from its chat template."""

import pytest

from router.text.formats.registry import tags_of, thoughts_behind, tool_format_of
from router.text.formats.shapes import (
    GEMMA_TAGS,
    HARMONY_TAGS,
    MISTRAL_TAGS,
    THINK_TAGS,
    Thoughts,
    ThoughtTags,
    ToolFormat,
)  # fmt: skip

TEMPLATES = {
    "{{ '<tool_call>\\n' + call | tojson + '\\n</tool_call>' }}": (ToolFormat.HERMES, None),
    "{{ '<think>' }}{{ '</think>' }}<tool_call><function=": (ToolFormat.XML, THINK_TAGS),
    'as {"name": function name, "parameters": dictionary of argument name and its value}': (ToolFormat.LLAMA, None),
    "{{ '[TOOL_CALLS]' + calls | tojson }}": (ToolFormat.MISTRAL_LIST, None),
    "[TOOL_CALLS]{{ name }}[CALL_ID]{{ id }}[ARGS]": (ToolFormat.MISTRAL_IDS, None),
    "[THINK]{{ thought }}[/THINK][TOOL_CALLS]{{ name }}[ARGS]": (ToolFormat.MISTRAL, MISTRAL_TAGS),
    "<|start|>assistant<|channel|>analysis<|message|>{{ message.thinking }}<|end|>": (ToolFormat.HARMONY, HARMONY_TAGS),
    "<|channel>thought\\n<channel|><|tool_call>call:": (ToolFormat.GEMMA, GEMMA_TAGS),
    "<start_of_turn>user": (ToolFormat.NONE, None),
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_format_is_that_of_the_template(template: str) -> None:
    assert (tool_format_of(template), tags_of(template)) == TEMPLATES[template]


@pytest.mark.parametrize(
    ("prompt", "tags", "thoughts"),
    [
        ("[INST]a[/INST]", MISTRAL_TAGS, "may come"),
        ("[INST]a[/INST][THINK]", MISTRAL_TAGS, "have begun"),
        ("<|turn>model\n", GEMMA_TAGS, "may come"),
        ("<|turn>model\n<|channel>thought\n<channel|>", GEMMA_TAGS, ""),
        ("<tool_response|><|channel>thought\n", GEMMA_TAGS, "have begun"),
        ("<|im_start|>assistant\n<think>\n", THINK_TAGS, "have begun"),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", THINK_TAGS, ""),
    ],
)
def test_a_prompt_tells_whether_thoughts_come(prompt: str, tags: ThoughtTags, thoughts: Thoughts) -> None:
    assert thoughts_behind(prompt, tags) == thoughts
