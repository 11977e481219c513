"""Fields of /v1/chat/completions: the fields shared with completions, and fields for a conversation."""

from dataclasses import dataclass

from common.base.json_file import Json, JsonObject
from common.wire.values.output_token import MAX_LOGPROBS
from router.base.json_fields import Field, Table, given
from router.base.json_rules import Boolean, Integer, OneOf, Only, Text, wrong
from router.requests.chat_messages import MESSAGES, Tools
from router.requests.completion_fields import GENERATION_FIELDS, MAX_MAX_TOKENS, SPECIAL_TOKENS, STREAMED
from router.requests.tool_choice import ToolChoice

MAX_KEY_CHARS = 512
MAX_TOKENS_ABOUT = "of each answer at most; refused if it exceeds the context; without it, what is left of the context"
OTHER_NAME = "OpenAI's newer name of `max_tokens`; at most one of them, or both alike"
BEGINS_ABOUT = "the prompt ends with what begins an answer; without it, it does unless a message is continued"
OPTIONS_ABOUT = "variables of the model's chat template, as `enable_thinking`; refused if it has none of that name"
TOOL_CHOICE_ABOUT = (
    "auto without it; none: the template does not get the tools; required: the answer is calls, with arguments that "
    "are valid by the tool's `parameters`; a function: it is one call of it; allowed_tools: the template gets all "
    "tools, and these alone are called"
)
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
NO_EFFORT = EFFORTS[0]
EFFORT_ABOUT = "for a template that knows it, or `enable_thinking`, which is false for none and true for all others"
UNLIMITED = -1
BUDGET_ABOUT = "so many tokens of thoughts at most, then their end is written; -1: no limit"
REASONING_ABOUT = "false: what the model thinks is left out of the response"
TAKEN = "taken, without effect"
LEVELS = OneOf(("low", "medium", "high"))
TIERS = ("auto", "default", "flex", "scale", "priority", "fast", "ultrafast")
PARALLEL_ABOUT = "false: at most one call"
TOOLS_ABOUT = (
    "functions for the template to show; calls are told apart in the formats of Qwen3 and Llama 3; those of a `strict` "
    "one have valid arguments"
)


@dataclass(frozen=True, slots=True)
class Options:
    """Rule: an object with arbitrary values."""

    wants = "an object"

    @property
    def schema(self) -> JsonObject:
        return {"type": "object"}

    def checked(self, name: str, value: Json) -> JsonObject:
        if not isinstance(value, dict):
            raise wrong(name, value, self.wants)
        return value


def _unless(name: str) -> JsonObject:
    return {"properties": {name: {"enum": [False, None]}}}


ONE_BEGINNING = {"anyOf": [_unless("continue_final_message"), _unless("add_generation_prompt")]}
"""JSON schema: the two fields are not both true."""
CHAT_FIELDS = Table(
    Field("messages", MESSAGES, None, "required; a `role` and a `content` each, a string or a list of texts"),
    Field("max_tokens", Integer(1, MAX_MAX_TOKENS), None, MAX_TOKENS_ABOUT),
    Field("max_completion_tokens", Integer(1, MAX_MAX_TOKENS), None, OTHER_NAME),
    Field("add_generation_prompt", Boolean(), None, BEGINS_ABOUT),
    Field("continue_final_message", Boolean(), False, "the answer continues the last message"),
    Field("chat_template_kwargs", Options(), {}, OPTIONS_ABOUT),
    Field("add_special_tokens", Boolean(), False, f"{SPECIAL_TOKENS}, beside those of the template"),
    Field("tools", Tools(), [], TOOLS_ABOUT),
    Field("tool_choice", ToolChoice(), None, TOOL_CHOICE_ABOUT),
    *GENERATION_FIELDS,
    Field("logprobs", Boolean(), False, "how likely each token was, before anything changed logits"),
    Field("top_logprobs", Integer(0, MAX_LOGPROBS), None, "so many of the likeliest, too; only with `logprobs`"),
    Field("reasoning_effort", OneOf(EFFORTS), None, EFFORT_ABOUT),
    Field("thinking_token_budget", Integer(UNLIMITED, MAX_MAX_TOKENS), None, BUDGET_ABOUT),
    Field("include_reasoning", Boolean(), True, REASONING_ABOUT),
    Field("verbosity", LEVELS, None, TAKEN),
    Field("store", Boolean(), None, f"{TAKEN}: nothing is stored"),
    Field("metadata", Options(), None, TAKEN),
    Field("prompt_cache_key", Text(MAX_KEY_CHARS), None, TAKEN),
    Field("prompt_cache_retention", Text(MAX_KEY_CHARS), None, TAKEN),
    Field("safety_identifier", Text(MAX_KEY_CHARS), None, TAKEN),
    Field("service_tier", OneOf(TIERS), None, TAKEN),
    Field("chat_template", Only((), "the model's own is used, never a client's")),
    Field("parallel_tool_calls", Boolean(), True, PARALLEL_ABOUT),
    Field("functions", Only(([],), "send tools")),
    Field("function_call", Only(("none", "auto"), "send tool_choice")),
    Field("documents", Only(([],))),
    Field("echo", Only((False,))),
    Field("prompt_logprobs", Only()),
    Field("modalities", Only((["text"],), "this model writes text only")),
    Field("audio", Only((), "this model writes text only")),
    Field("prediction", Only()),
    Field("web_search_options", Only()),
    relations=[
        STREAMED,
        {"anyOf": [{"properties": {"top_logprobs": {"enum": [0, None]}}}, given("logprobs", {"const": True})]},
        ONE_BEGINNING,
    ],
)
