"""All formats of tool calls: how each is read, and what its models and templates need."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol

from common.base.json_file import JsonObject
from router.text.formats.gemma import GemmaCall
from router.text.formats.harmony import HARMONY_TOKENS, HarmonyAnswer, with_thinking
from router.text.formats.json_calls import CallObjects, TaggedCalls
from router.text.formats.mistral import MistralCalls, with_short_ids
from router.text.formats.parts import CallReader, CallWriter, HeldText, Part, long_id, short_id
from router.text.formats.shapes import (
    ARGS,
    CALL,
    CALL_END,
    CALL_ID,
    CALLS,
    CHANNEL,
    FUNCTION,
    GEMMA_CALL,
    GEMMA_CALL_END,
    GEMMA_QUOTE,
    GEMMA_TAGS,
    HARMONY_CALL,
    HARMONY_TAGS,
    MESSAGE,
    MESSAGE_END,
    MISTRAL_FORMATS,
    MISTRAL_TAGS,
    RETURN,
    START,
    THINK_TAGS,
    Thoughts,
    ThoughtTags,
    ToolFormat,
)
from router.text.formats.tagged import TaggedAnswer
from router.text.formats.typed_values import ToolSchemas
from router.text.formats.xml_calls import XmlCall

PYTHON_TAG = "<|python_tag|>"
LLAMA_CALL = '"parameters": dictionary of argument name'
"""Found in Llama 3's templates, in the request for calls."""
NO_OPENERS: Mapping[str, bool] = MappingProxyType({})
NewReader = Callable[[CallWriter, ToolSchemas], CallReader]
Messages = Sequence[JsonObject]


class AnswerReader(Protocol):
    """Incremental reader of a whole answer; the caller appends text to `held`."""

    held: HeldText

    @property
    def holds_content(self) -> bool: ...

    def step(self, part: Part, is_last: bool) -> bool:
        """Add the next certain part to the empty `part`; tell whether another may follow."""
        ...


def _unchanged(messages: Messages) -> Messages:
    return messages


class AnswerFormat(NamedTuple):
    """Format of an answer with tool calls between tags.

    Args:
        new_reader: makes the reader of the text behind the trigger.
        trigger: before each call; "" if calls stand only at the beginning of an answer.
        openers: texts that begin a call at the beginning of an answer, each with whether it belongs to the call.
        tokens: tags that may be special tokens, and must have a text.
        stops: tokens that end an answer, whatever the model's configuration lists.
        new_id: makes ids of calls.
        history: returns messages as the template takes them.
    """

    new_reader: NewReader
    trigger: str = ""
    openers: Mapping[str, bool] = NO_OPENERS
    tokens: tuple[str, ...] = ()
    stops: tuple[str, ...] = ()
    new_id: Callable[[], str] = long_id
    history: Callable[[Messages], Messages] = _unchanged


def _alone(calls: CallWriter, _: ToolSchemas) -> CallReader:
    return CallObjects(calls)


def _hermes(calls: CallWriter, _: ToolSchemas) -> CallReader:
    return TaggedCalls(calls)


def _mistral(calls: CallWriter, _: ToolSchemas) -> CallReader:
    return MistralCalls(calls)


def _gemma(calls: CallWriter, _: ToolSchemas) -> CallReader:
    return GemmaCall(calls)


MISTRAL = AnswerFormat(_mistral, CALLS, tokens=(CALLS, CALL_ID, ARGS), new_id=short_id, history=with_short_ids)
FORMATS = {
    ToolFormat.NONE: AnswerFormat(_alone),
    ToolFormat.HERMES: AnswerFormat(_hermes, CALL, tokens=(CALL, CALL_END)),
    ToolFormat.XML: AnswerFormat(XmlCall, CALL, tokens=(CALL, CALL_END)),
    ToolFormat.LLAMA: AnswerFormat(_alone, openers={PYTHON_TAG: False, "{": True}),
    **dict.fromkeys(MISTRAL_FORMATS, MISTRAL),
    ToolFormat.HARMONY: AnswerFormat(
        _alone, tokens=HARMONY_TOKENS, stops=(RETURN, HARMONY_CALL), history=with_thinking
    ),
    ToolFormat.GEMMA: AnswerFormat(
        _gemma,
        GEMMA_CALL,
        tokens=(GEMMA_CALL, GEMMA_CALL_END, GEMMA_QUOTE),
        stops=("<turn|>", "<|tool_response>"),
    ),
}


def answer_reader(
    tool_format: ToolFormat, thoughts: Thoughts, tags: ThoughtTags, calls: CallWriter, schemas: ToolSchemas
) -> AnswerReader:
    """Make the reader of an answer."""
    if tool_format is ToolFormat.HARMONY:
        return HarmonyAnswer(thoughts, calls)
    found = FORMATS[tool_format]
    return TaggedAnswer(thoughts, tags, found.trigger, found.openers, lambda: found.new_reader(calls, schemas))


def tool_format_of(template: str) -> ToolFormat:
    """Return the format in which a chat template asks the model to call tools."""
    if CHANNEL in template and MESSAGE in template:
        return ToolFormat.HARMONY
    if CALLS in template:
        has_ids, has_args = CALL_ID in template, ARGS in template
        return ToolFormat.MISTRAL_IDS if has_ids else ToolFormat.MISTRAL if has_args else ToolFormat.MISTRAL_LIST
    if GEMMA_CALL in template:
        return ToolFormat.GEMMA
    if CALL in template:
        return ToolFormat.XML if FUNCTION in template else ToolFormat.HERMES
    return ToolFormat.LLAMA if LLAMA_CALL in template else ToolFormat.NONE


def tags_of(template: str) -> ThoughtTags | None:
    """Return the tags of thoughts that a chat template knows; None if answers have no thoughts."""
    if tool_format_of(template) is ToolFormat.HARMONY:
        return HARMONY_TAGS
    return next((tags for tags in (THINK_TAGS, MISTRAL_TAGS, GEMMA_TAGS) if tags.end in template), None)


def thoughts_behind(prompt: str, tags: ThoughtTags) -> Thoughts:
    """Return the thoughts before the answer to a prompt: begun, possible or none.

    A template suppresses thoughts by writing their end. A prompt of harmony may end inside a message.
    """
    text = prompt.rstrip()
    if tags == HARMONY_TAGS:
        header, is_inside, _ = text.rpartition(START)[2].partition(MESSAGE)
        if not is_inside or text.endswith(MESSAGE_END):
            return "may come"
        return "have begun" if f"{CHANNEL}analysis" in header else ""
    if text.endswith(tags.end):
        return ""
    return "have begun" if text.endswith(tags.begin) else "may come"
