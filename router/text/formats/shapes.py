"""Texts around thoughts, calls and answers in each format, written by grammars and found by readers."""

import json
from enum import StrEnum
from typing import Literal, NamedTuple

CALL, CALL_END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
NEW_ID = "\ufdd0"
"""Place of a new id of nine letters and digits in a text of a shape; no character of any text."""
GEMMA_CALL, GEMMA_CALL_END, GEMMA_QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
MESSAGE_END, RETURN, HARMONY_CALL = "<|end|>", "<|return|>", "<|call|>"
NEXT_MESSAGE = f"{START}assistant"
"""Text between two messages of an answer in harmony."""

Thoughts = Literal["", "may come", "have begun"]
"""Thoughts at the beginning of an answer. "have begun" means the opening tag is in the prompt."""
ArgumentsForm = Literal["json", "xml", "gemma"]


class ToolFormat(StrEnum):
    """Format in which a model writes calls."""

    NONE = ""
    HERMES = "hermes"  # <tool_call>{"name": ..., "arguments": {...}}</tool_call>, used by Qwen3
    XML = "xml"  # <tool_call><function=...><parameter=...>...</parameter></function></tool_call>, used by Qwen3.5
    LLAMA = "llama"  # {"name": ..., "parameters": {...}} alone, used by Llama 3
    MISTRAL_LIST = "mistral list"  # [TOOL_CALLS][{"name": ..., "arguments": {...}, "id": ...}, ...], of v3 and v7
    MISTRAL_IDS = "mistral ids"  # [TOOL_CALLS]NAME[CALL_ID]...[ARGS]{...}, of v11
    MISTRAL = "mistral"  # [TOOL_CALLS]NAME[ARGS]{...}, of v13 and later
    HARMONY = "harmony"  # <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}, used by gpt-oss
    GEMMA = "gemma"  # <|tool_call>call:NAME{key:<|"|>text<|"|>,...}<tool_call|>, used by Gemma 4


MISTRAL_FORMATS = (ToolFormat.MISTRAL_LIST, ToolFormat.MISTRAL_IDS, ToolFormat.MISTRAL)


class ThoughtTags(NamedTuple):
    """Texts around the thoughts at the beginning of an answer."""

    begin: str
    end: str
    behind: str = ""  # between the end and the answer; "": line breaks, perhaps


THINK, THINK_END = "<think>", "</think>"
THINK_TAGS = ThoughtTags(THINK, THINK_END)
MISTRAL_TAGS = ThoughtTags("[THINK]", "[/THINK]")
GEMMA_TAGS = ThoughtTags("<|channel>thought", "<channel|>")
HARMONY_TAGS = ThoughtTags(f"{CHANNEL}analysis{MESSAGE}", MESSAGE_END, NEXT_MESSAGE)


class CallShape(NamedTuple):
    """Text around the parts of a call, forced by a grammar."""

    trigger: str  # only before each call, or each list of calls; "": plain text begins unlike a call
    before: str  # between trigger and name
    between: str  # between name and arguments
    behind: str
    end: str  # only at the end of each call
    separator: str | None  # between calls; None: a single call
    arguments: ArgumentsForm = "json"
    is_name_json: bool = False
    list_begin: str = ""  # between the trigger and a list of calls; "": each call has a trigger
    list_end: str = ""
    header: str = ""  # before a text without calls
    lead: tuple[str, str, str] = ("", "", "")  # of a text that precedes a call: header, end tag, and text behind

    def name(self, name: str) -> str:
        """Return a tool's name as written in a call."""
        return json.dumps(name, ensure_ascii=False) if self.is_name_json else name

    def opening(self, name: str) -> str:
        """Return all text before the arguments of an answer's first call."""
        return f"{self.trigger}{self.list_begin}{self.before}{self.name(name)}{self.between}"


SHAPES = {
    ToolFormat.HERMES: CallShape(CALL, '\n{"name": ', ', "arguments": ', "}\n", CALL_END, "\n", is_name_json=True),
    ToolFormat.XML: CallShape(CALL, f"\n{FUNCTION}", ">\n", f"{FUNCTION_END}\n", CALL_END, "\n", "xml"),
    ToolFormat.LLAMA: CallShape("", '{"name": ', ', "parameters": ', "}", "", None, is_name_json=True),
    ToolFormat.MISTRAL_LIST: CallShape(
        CALLS,
        '{"name": ',
        ', "arguments": ',
        f', "id": "{NEW_ID}"}}',
        "",
        ", ",
        is_name_json=True,
        list_begin="[",
        list_end="]",
    ),
    ToolFormat.MISTRAL_IDS: CallShape(CALLS, "", f"{CALL_ID}{NEW_ID}{ARGS}", "", "", ""),
    ToolFormat.MISTRAL: CallShape(CALLS, "", ARGS, "", "", ""),
    ToolFormat.HARMONY: CallShape(
        "",
        f"{CHANNEL}commentary to=functions.",
        f" {CONSTRAIN}json{MESSAGE}",
        "",
        "",
        None,
        header=f"{CHANNEL}final{MESSAGE}",
        lead=(f"{CHANNEL}commentary{MESSAGE}", MESSAGE_END, NEXT_MESSAGE),
    ),
    ToolFormat.GEMMA: CallShape(GEMMA_CALL, "call:", "", "", GEMMA_CALL_END, "", "gemma"),
}
MARKS = (
    THINK, THINK_END, CALL, CALL_END, *MISTRAL_TAGS[:2], CALLS, CALL_ID, ARGS, START, CHANNEL, CONSTRAIN, MESSAGE,
    MESSAGE_END, GEMMA_TAGS.end, GEMMA_CALL, GEMMA_CALL_END, GEMMA_QUOTE, "<|channel>",
)  # fmt: skip
"""Tags used in grammars, each a single token of many models. llguidance treats such a token as no text, allowed only
where named."""
