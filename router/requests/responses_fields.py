"""Fields of /v1/responses: OpenAI's fields, and additions known from vLLM.

A field only about storage, bills or tools at OpenAI is taken without effect. A field requiring a stored response is
refused.
"""

from common.base.errors import RequestError
from common.base.json_file import Json, JsonObject
from common.wire.values.output_token import MAX_LOGPROBS
from router.base.json_fields import Field, Table, given, object_of
from router.base.json_rules import (
    ANY_OBJECT,
    BOOLEAN,
    Rule,
    integer,
    is_text,
    one_of,
    only,
    shown,
    string,
    wrong,
)
from router.requests.chat_fields import CHAT_FIELDS, EFFORT_ABOUT, EFFORTS, LEVELS, MAX_KEY_CHARS, TAKEN, TIERS
from router.requests.chat_messages import CALLABLE, MAX_CALLS, check_callable
from router.requests.completion_fields import MAX_MAX_TOKENS
from router.requests.responses_input import INPUT
from router.requests.structured_fields import HAS_SCHEMA, SCHEMA
from router.requests.tool_choice import MODES, TOOL_CHOICE, Choice, allowed_tools

LOGPROBS = "message.output_text.logprobs"
INCLUDED = (
    LOGPROBS,
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)
MAX_PAIRS, MAX_PAIR_KEY_CHARS, MAX_PAIR_VALUE_CHARS = 16, 64, 512
NOT_STORED = "nothing is stored: send the whole conversation as `input`"
INPUT_ABOUT = "required; a text, or messages, function calls, their outputs and what was thought"
SCHEMA_ABOUT = "with `json_schema`: by which the text is valid, unless `max_output_tokens` ends it"
SUMMARIES = one_of("auto", "concise", "detailed")


def _included(name: str, value: Json) -> list[str]:
    if not isinstance(value, list):
        raise wrong(name, value, INCLUDE.wants)
    for each in value:
        if not isinstance(each, str) or each not in INCLUDED:
            raise wrong(name, each, INCLUDE.wants)
    return value


INCLUDE = Rule(
    f"a list of some of {', '.join(INCLUDED)}", {"type": "array", "items": {"enum": list(INCLUDED)}}, _included
)
"""Rule for contents of the response beside texts."""


def _metadata(name: str, value: Json) -> dict[str, str]:
    if not isinstance(value, dict) or len(value) > MAX_PAIRS:
        raise wrong(name, value, METADATA.wants)
    for key, each in value.items():
        is_fine = is_text(key) and is_text(each)
        if not is_fine or len(key) > MAX_PAIR_KEY_CHARS or len(each) > MAX_PAIR_VALUE_CHARS:
            raise wrong(name, each if is_text(key) else key, METADATA.wants)
    return value


METADATA = Rule(
    f"an object of at most {MAX_PAIRS} strings of at most {MAX_PAIR_VALUE_CHARS} characters, with names of at most "
    f"{MAX_PAIR_KEY_CHARS}",
    {
        "type": "object",
        "additionalProperties": {"type": "string", "maxLength": MAX_PAIR_VALUE_CHARS},
        "propertyNames": {"maxLength": MAX_PAIR_KEY_CHARS},
        "maxProperties": MAX_PAIRS,
    },
    _metadata,
)
"""Rule for a few short texts by name."""


def _functions(name: str, value: Json) -> list[JsonObject]:
    if not isinstance(value, list) or len(value) > MAX_CALLS:
        raise wrong(name, value, FUNCTIONS.wants)
    return [_function(f"{name}[{index}]", tool) for index, tool in enumerate(value)]


def _function(name: str, tool: Json) -> JsonObject:
    if not isinstance(tool, dict):
        raise wrong(name, tool, FUNCTIONS.wants)
    if tool.get("type") != "function":
        what = f"{name}.type = {shown(tool.get('type'))}"
        message = f'{what} is not supported: no tool runs here; send {{"type": "function"}}, and call it yourself'
        raise RequestError(message, param=f"{name}.type", code="unsupported_value")
    check_callable(name, tool)
    kept = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {key: tool[key] for key in kept if tool.get(key) is not None}}


FUNCTIONS = Rule(
    f'a list of at most {MAX_CALLS} {{"type": "function", "name": "...", "parameters": {{...}}}}',
    {"type": "array", "items": {"allOf": [CALLABLE, given("type", {"const": "function"})]}, "maxItems": MAX_CALLS},
    _functions,
)
"""Rule for callable functions; gives functions in the form of chats."""


def _choice(name: str, value: Json) -> Choice:
    try:
        choice: Choice = TOOL_CHOICE.checked(name, _choice_as_in_chats(value))
    except RequestError:
        raise wrong(name, value, CHOICE.wants) from None
    return choice


def _choice_as_in_chats(value: Json) -> Json:
    if not isinstance(value, dict) or value.get("type") != "allowed_tools":
        return _function_as_in_chats(value)
    tools = value.get("tools")
    named = list(map(_function_as_in_chats, tools)) if isinstance(tools, list) else tools
    return {"type": "allowed_tools", "allowed_tools": {"mode": value.get("mode"), "tools": named}}


def _function_as_in_chats(value: Json) -> Json:
    """Return an object naming a function in the form of chats; other values stay."""
    return {"type": value.get("type"), "function": {"name": value.get("name")}} if isinstance(value, dict) else value


NAMED = {
    "type": "object",
    "properties": {"type": {"const": "function"}, "name": {"type": "string"}},
    "required": ["type", "name"],
}
CHOICE = Rule(
    '"auto", "none", "required", {"type": "function", "name": "..."} or '
    '{"type": "allowed_tools", "mode": "auto" or "required", "tools": [...]}',
    {
        "anyOf": [
            {"enum": list(MODES)},
            NAMED,
            {
                "type": "object",
                "properties": {"type": {"const": "allowed_tools"}} | allowed_tools(NAMED),
                "required": ["type", "mode", "tools"],
            },
        ]
    },
    _choice,
)
"""Rule for allowed or required tools, with the result of chats."""

FORMAT = Table(
    Field("type", one_of("text", "json_object", "json_schema"), None, "the text is JSON"),
    Field("name", string(64), None, "taken, without effect, as the next"),
    Field("description", string()),
    Field("schema", SCHEMA, None, SCHEMA_ABOUT),
    Field("strict", BOOLEAN, None, "as that of a chat's `json_schema`"),
    relations=[{"anyOf": [given("type", {"enum": ["text", "json_object"]}), HAS_SCHEMA]}],
)
TEXT = Table(Field("format", object_of(FORMAT, required="type")), Field("verbosity", LEVELS, None, TAKEN))
REASONING = Table(
    Field("effort", one_of(*EFFORTS), None, EFFORT_ABOUT),
    Field("summary", SUMMARIES, None, "thoughts come as `summary`, as they are, not as `content`"),
    Field("generate_summary", SUMMARIES, None, "older name of `summary`"),
    Field("context", only("auto")),
    Field("mode", only("standard")),
)
STREAM_OPTIONS = Table(Field("include_obfuscation", BOOLEAN, False, f"{TAKEN}: no padding is sent"))
OF_CHATS = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
}
"""Fields that have another name here than in chats."""
ALSO_OF_CHATS = (
    "chat_template_kwargs", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias", "allowed_token_ids", "bad_words", "min_tokens", "stop", "include_stop_str_in_output",
    "stop_token_ids", "ignore_eos", "skip_special_tokens", "cache_salt", "priority", "structured_outputs",
    "thinking_token_budget", "include_reasoning",
)  # fmt: skip
"""Fields beyond OpenAI's, with the same effect as in chats."""

RESPONSES_FIELDS = Table(
    CHAT_FIELDS.fields["model"],
    Field("input", INPUT, None, INPUT_ABOUT),
    Field("instructions", string(), None, "a message of the system before the input"),
    Field(
        "max_output_tokens",
        integer(1, MAX_MAX_TOKENS),
        None,
        "of thoughts and answer; see a chat's `max_tokens`",
    ),
    CHAT_FIELDS.fields["temperature"],
    CHAT_FIELDS.fields["top_p"],
    Field("stream", BOOLEAN, False, "server-sent events, each named as its `type`"),
    Field("stream_options", object_of(STREAM_OPTIONS)),
    Field("text", object_of(TEXT)),
    Field("tools", FUNCTIONS, [], "functions for the template to show; see a chat's `tools`"),
    Field("tool_choice", CHOICE, None, "auto without it; see a chat's `tool_choice`"),
    CHAT_FIELDS.fields["parallel_tool_calls"],
    Field("reasoning", object_of(REASONING)),
    Field("include", INCLUDE, [], f"`{LOGPROBS}`: how likely each token was; the others: {TAKEN}"),
    Field("top_logprobs", integer(0, MAX_LOGPROBS), None, "so many of the likeliest, too, where they are included"),
    Field("metadata", METADATA, {}, "told again in the response, as the next two"),
    Field("safety_identifier", string(MAX_KEY_CHARS)),
    Field("prompt_cache_key", string(MAX_KEY_CHARS)),
    CHAT_FIELDS.fields["user"],
    Field("store", BOOLEAN, False, f"{TAKEN}: nothing is stored"),
    Field("service_tier", one_of(*TIERS), None, TAKEN),
    Field("max_tool_calls", integer(1, MAX_MAX_TOKENS), None, f"{TAKEN}: it concerns tools that a server runs"),
    Field("prompt_cache_retention", one_of("in_memory", "in-memory", "24h"), None, TAKEN),
    Field("prompt_cache_options", ANY_OBJECT, {}, TAKEN),
    *(CHAT_FIELDS.fields[name] for name in ALSO_OF_CHATS),
    Field("previous_response_id", only(remedy=NOT_STORED)),
    Field("conversation", only(remedy=NOT_STORED)),
    Field("prompt", only(remedy="no prompts are stored: send `instructions` and `input`")),
    Field("background", only(False, remedy="nothing is stored that could be asked for later: stream")),
    Field("truncation", only("disabled", remedy="an input that exceeds the context is refused, not cut")),
    Field("context_management", only([])),
    Field("moderation", only()),
    Field("image", only({})),
    Field("access_programs", only({})),
    *(Field(name, only(remedy=f"send {own}")) for name, own in OF_CHATS.items()),
)
