"""All formats of tool calls: how each is read, and what its models and templates need."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol

from common.base.json_file import Json, JsonObject
from router.text.formats.gemma import GemmaCall, with_responses
from router.text.formats.harmony import HARMONY_TOKENS, HarmonyAnswer, with_descriptions, with_thinking
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
Messages = Sequence[JsonObject]
Tools = Sequence[Json]


class AnswerReader(Protocol):
    """Incremental reader of a whole answer; the caller appends text to `held`.

    Attributes:
        cut_header: header of a message, if the answer ended inside of it; always "" for answers without headers.
    """

    held: HeldText
    cut_header: str

    @property
    def holds_content(self) -> bool: ...

    def step(self, part: Part, is_last: bool) -> bool:
        """Add the next certain part to the empty `part`; tell whether another may follow."""
        ...


NewReader = Callable[[Thoughts, ThoughtTags, CallWriter, ToolSchemas], AnswerReader]


def _as_it_is(messages: Messages, _: str) -> Messages:
    return messages


def _unchanged(tools: Tools) -> Tools:
    return tools


def _gemma_history(messages: Messages, template: str) -> Messages:
    return with_responses(messages) if "tool_responses" in template else messages


class AnswerFormat(NamedTuple):
    """Format of a model's answers, and what its templates need.

    Args:
        new_reader: makes the reader of an answer.
        tokens: tags that may be special tokens, and must have a text.
        stops: tokens that end an answer, whatever the model's configuration lists.
        new_id: makes ids of calls.
        history: returns messages as a template takes them, given its source.
        tools: returns tools as the template takes them.
    """

    new_reader: NewReader
    tokens: tuple[str, ...] = ()
    stops: tuple[str, ...] = ()
    new_id: Callable[[], str] = long_id
    history: Callable[[Messages, str], Messages] = _as_it_is
    tools: Callable[[Tools], Tools] = _unchanged


def _tagged(
    new_call: Callable[[CallWriter, ToolSchemas], CallReader], trigger: str, openers: Mapping[str, bool] = NO_OPENERS
) -> NewReader:
    """Return a maker of readers of answers with tags; the arguments are those of `TaggedAnswer`."""

    def new_reader(thoughts: Thoughts, tags: ThoughtTags, calls: CallWriter, schemas: ToolSchemas) -> AnswerReader:
        return TaggedAnswer(thoughts, tags, trigger, openers, lambda: new_call(calls, schemas))

    return new_reader


def _harmony(thoughts: Thoughts, _: ThoughtTags, calls: CallWriter, __: ToolSchemas) -> AnswerReader:
    return HarmonyAnswer(thoughts, calls)


def _objects(calls: CallWriter, _: ToolSchemas) -> CallReader:
    return CallObjects(calls)


def _hermes(calls: CallWriter, _: ToolSchemas) -> CallReader:
    return TaggedCalls(calls)


def _mistral(calls: CallWriter, _: ToolSchemas) -> CallReader:
    return MistralCalls(calls)


def _gemma(calls: CallWriter, _: ToolSchemas) -> CallReader:
    return GemmaCall(calls)


MISTRAL = AnswerFormat(
    _tagged(_mistral, CALLS),
    tokens=(CALLS, CALL_ID, ARGS),
    new_id=short_id,
    history=lambda messages, _: with_short_ids(messages),
)
FORMATS = {
    ToolFormat.NONE: AnswerFormat(_tagged(_objects, trigger="")),  # no call begins
    ToolFormat.HERMES: AnswerFormat(_tagged(_hermes, CALL), tokens=(CALL, CALL_END)),
    ToolFormat.XML: AnswerFormat(_tagged(XmlCall, CALL), tokens=(CALL, CALL_END)),
    ToolFormat.LLAMA: AnswerFormat(_tagged(_objects, trigger="", openers={PYTHON_TAG: False, "{": True})),
    **dict.fromkeys(MISTRAL_FORMATS, MISTRAL),
    ToolFormat.HARMONY: AnswerFormat(
        _harmony,
        tokens=HARMONY_TOKENS,
        stops=(RETURN, HARMONY_CALL),
        history=lambda messages, _: with_thinking(messages),
        tools=with_descriptions,
    ),
    ToolFormat.GEMMA: AnswerFormat(
        _tagged(_gemma, GEMMA_CALL),
        tokens=(GEMMA_CALL, GEMMA_CALL_END, GEMMA_QUOTE),
        stops=("<turn|>", "<|tool_response>"),
        history=_gemma_history,
    ),
}


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
