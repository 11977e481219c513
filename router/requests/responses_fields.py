"""Fields of /v1/responses: OpenAI's fields, and additions known from vLLM.

A field only about storage, bills or tools at OpenAI is taken without effect. A field requiring a stored response is
refused.
"""

from dataclasses import dataclass

from common.base.errors import RequestError
from common.base.json_file import Json, JsonObject
from common.wire.values.output_token import MAX_LOGPROBS
from router.base.json_fields import Field, Object, Table, given
from router.base.json_rules import Boolean, Integer, OneOf, Only, Text, is_text, shown, wrong
from router.requests.chat_fields import CHAT_FIELDS, EFFORT_ABOUT, EFFORTS, LEVELS, MAX_KEY_CHARS, TAKEN, TIERS, Options
from router.requests.chat_messages import CALLABLE, MAX_CALLS, check_callable
from router.requests.completion_fields import MAX_MAX_TOKENS
from router.requests.responses_input import Input
from router.requests.structured_fields import HAS_SCHEMA, Schema
from router.requests.tool_choice import MODES, ToolChoice

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
SUMMARIES = OneOf(("auto", "concise", "detailed"))


@dataclass(frozen=True, slots=True)
class Included:
    """Rule: a list of contents for the response beside texts."""

    wants = f"a list of some of {', '.join(INCLUDED)}"

    @property
    def schema(self) -> JsonObject:
        return {"type": "array", "items": {"enum": list(INCLUDED)}}

    def checked(self, name: str, value: Json) -> list[str]:
        if not isinstance(value, list):
            raise wrong(name, value, self.wants)
        for each in value:
            if not isinstance(each, str) or each not in INCLUDED:
                raise wrong(name, each, self.wants)
        return value


@dataclass(frozen=True, slots=True)
class Metadata:
    """Rule: a few short texts by name."""

    wants = (
        f"an object of at most {MAX_PAIRS} strings of at most {MAX_PAIR_VALUE_CHARS} characters, with names of at most "
        f"{MAX_PAIR_KEY_CHARS}"
    )

    @property
    def schema(self) -> JsonObject:
        value = {"type": "string", "maxLength": MAX_PAIR_VALUE_CHARS}
        names = {"maxLength": MAX_PAIR_KEY_CHARS}
        return {"type": "object", "additionalProperties": value, "propertyNames": names, "maxProperties": MAX_PAIRS}

    def checked(self, name: str, value: Json) -> dict[str, str]:
        if not isinstance(value, dict) or len(value) > MAX_PAIRS:
            raise wrong(name, value, self.wants)
        for key, each in value.items():
            is_fine = is_text(key) and is_text(each)
            if not is_fine or len(key) > MAX_PAIR_KEY_CHARS or len(each) > MAX_PAIR_VALUE_CHARS:
                raise wrong(name, each if is_text(key) else key, self.wants)
        return value


@dataclass(frozen=True, slots=True)
class Functions:
    """Rule: callable functions; gives functions in the form of chats."""

    wants = f'a list of at most {MAX_CALLS} {{"type": "function", "name": "...", "parameters": {{...}}}}'

    @property
    def schema(self) -> JsonObject:
        tool = {"allOf": [CALLABLE, given("type", {"const": "function"})]}
        return {"type": "array", "items": tool, "maxItems": MAX_CALLS}

    def checked(self, name: str, value: Json) -> list[JsonObject]:
        if not isinstance(value, list) or len(value) > MAX_CALLS:
            raise wrong(name, value, self.wants)
        return [self._tool(f"{name}[{index}]", tool) for index, tool in enumerate(value)]

    def _tool(self, name: str, tool: Json) -> JsonObject:
        if not isinstance(tool, dict):
            raise wrong(name, tool, self.wants)
        if tool.get("type") != "function":
            what = f"{name}.type = {shown(tool.get('type'))}"
            message = f'{what} is not supported: no tool runs here; send {{"type": "function"}}, and call it yourself'
            raise RequestError(message, param=f"{name}.type", code="unsupported_value")
        check_callable(name, tool)
        told = ("name", "description", "parameters", "strict")
        return {"type": "function", "function": {key: tool[key] for key in told if tool.get(key) is not None}}


@dataclass(frozen=True, slots=True)
class Choice:
    """Rule: allowed or required tools; gives a `tool_choice.Choice`, as chats do."""

    wants = (
        '"auto", "none", "required", {"type": "function", "name": "..."} or '
        '{"type": "allowed_tools", "mode": "auto" or "required", "tools": [...]}'
    )

    @property
    def schema(self) -> JsonObject:
        function = {
            "type": "object",
            "properties": {"type": {"const": "function"}, "name": {"type": "string"}},
            "required": ["type", "name"],
        }
        allowed = {
            "type": "object",
            "properties": {
                "type": {"const": "allowed_tools"},
                "mode": {"enum": list(MODES[1:])},
                "tools": {"type": "array", "items": function, "minItems": 1},
            },
            "required": ["type", "mode", "tools"],
        }
        return {"anyOf": [{"enum": list(MODES)}, function, allowed]}

    def checked(self, name: str, value: Json) -> Json:
        try:
            return ToolChoice().checked(name, self._as_in_chats(value))
        except RequestError:
            raise wrong(name, value, self.wants) from None

    def _as_in_chats(self, value: Json) -> Json:
        if not isinstance(value, dict) or value.get("type") != "allowed_tools":
            return _function_as_in_chats(value)
        tools = value.get("tools")
        named = list(map(_function_as_in_chats, tools)) if isinstance(tools, list) else tools
        return {"type": "allowed_tools", "allowed_tools": {"mode": value.get("mode"), "tools": named}}


def _function_as_in_chats(value: Json) -> Json:
    """Return an object naming a function in the form of chats; other values stay."""
    return {"type": value.get("type"), "function": {"name": value.get("name")}} if isinstance(value, dict) else value


FORMAT = Table(
    Field("type", OneOf(("text", "json_object", "json_schema")), None, "the text is JSON"),
    Field("name", Text(64), None, "taken, without effect, as the next"),
    Field("description", Text()),
    Field("schema", Schema(), None, SCHEMA_ABOUT),
    Field("strict", Boolean(), None, "as that of a chat's `json_schema`"),
    relations=[{"anyOf": [given("type", {"enum": ["text", "json_object"]}), HAS_SCHEMA]}],
)
TEXT = Table(Field("format", Object(FORMAT, required="type")), Field("verbosity", LEVELS, None, TAKEN))
REASONING = Table(
    Field("effort", OneOf(EFFORTS), None, EFFORT_ABOUT),
    Field("summary", SUMMARIES, None, "thoughts come as `summary`, as they are, not as `content`"),
    Field("generate_summary", SUMMARIES, None, "older name of `summary`"),
    Field("context", Only(("auto",))),
    Field("mode", Only(("standard",))),
)
STREAM_OPTIONS = Table(Field("include_obfuscation", Boolean(), False, f"{TAKEN}: no padding is sent"))
ALSO_OF_CHATS = (
    "chat_template_kwargs", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias", "allowed_token_ids", "bad_words", "min_tokens", "stop", "include_stop_str_in_output",
    "stop_token_ids", "ignore_eos", "skip_special_tokens", "cache_salt", "priority", "structured_outputs",
    "thinking_token_budget", "include_reasoning",
)  # fmt: skip
"""Fields beyond OpenAI's, with the same effect as in chats."""

RESPONSES_FIELDS = Table(
    CHAT_FIELDS.fields["model"],
    Field("input", Input(), None, INPUT_ABOUT),
    Field("instructions", Text(), None, "a message of the system before the input"),
    Field(
        "max_output_tokens",
        Integer(1, MAX_MAX_TOKENS),
        None,
        "of thoughts and answer; see a chat's `max_tokens`",
    ),
    CHAT_FIELDS.fields["temperature"],
    CHAT_FIELDS.fields["top_p"],
    Field("stream", Boolean(), False, "server-sent events, each named as its `type`"),
    Field("stream_options", Object(STREAM_OPTIONS)),
    Field("text", Object(TEXT)),
    Field("tools", Functions(), [], "functions for the template to show; see a chat's `tools`"),
    Field("tool_choice", Choice(), None, "auto without it; see a chat's `tool_choice`"),
    CHAT_FIELDS.fields["parallel_tool_calls"],
    Field("reasoning", Object(REASONING)),
    Field("include", Included(), [], f"`{LOGPROBS}`: how likely each token was; the others: {TAKEN}"),
    Field("top_logprobs", Integer(0, MAX_LOGPROBS), None, "so many of the likeliest, too, where they are included"),
    Field("metadata", Metadata(), {}, "told again in the response, as the next two"),
    Field("safety_identifier", Text(MAX_KEY_CHARS)),
    Field("prompt_cache_key", Text(MAX_KEY_CHARS)),
    CHAT_FIELDS.fields["user"],
    Field("store", Boolean(), False, f"{TAKEN}: nothing is stored"),
    Field("service_tier", OneOf(TIERS), None, TAKEN),
    Field("max_tool_calls", Integer(1, MAX_MAX_TOKENS), None, f"{TAKEN}: it concerns tools that a server runs"),
    Field("prompt_cache_retention", OneOf(("in_memory", "in-memory", "24h")), None, TAKEN),
    Field("prompt_cache_options", Options(), {}, TAKEN),
    *(CHAT_FIELDS.fields[name] for name in ALSO_OF_CHATS),
    Field("previous_response_id", Only((), NOT_STORED)),
    Field("conversation", Only((), NOT_STORED)),
    Field("prompt", Only((), "no prompts are stored: send `instructions` and `input`")),
    Field("background", Only((False,), "nothing is stored that could be asked for later: stream")),
    Field("truncation", Only(("disabled",), "an input that exceeds the context is refused, not cut")),
    Field("context_management", Only(([],))),
    Field("moderation", Only()),
    Field("image", Only(({},))),
    Field("access_programs", Only(({},))),
)
