"""Fields of /v1/chat/completions: the fields shared with completions, and fields for a conversation."""

from common.base.json_file import JsonObject
from common.wire.values.output_token import MAX_LOGPROBS
from router.base.json_fields import Field, Table, given
from router.base.json_rules import ANY_OBJECT, BOOLEAN, integer, one_of, only, string
from router.requests.chat_messages import MESSAGES, TOOLS
from router.requests.completion_fields import GENERATION_FIELDS, MAX_MAX_TOKENS, SPECIAL_TOKENS, STREAMED
from router.requests.tool_choice import TOOL_CHOICE

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
LEVELS = one_of("low", "medium", "high")
TIERS = ("auto", "default", "flex", "scale", "priority", "fast", "ultrafast")
PARALLEL_ABOUT = "false: at most one call"
TOOLS_ABOUT = (
    "functions for the template to show; calls are told apart in the formats of Qwen3, Qwen3.5, Llama 3, Mistral, "
    "gpt-oss and Gemma 4; those of a `strict` one have valid arguments"
)


def _unless(name: str) -> JsonObject:
    return {"properties": {name: {"enum": [False, None]}}}


ONE_BEGINNING = {"anyOf": [_unless("continue_final_message"), _unless("add_generation_prompt")]}
"""JSON schema: the two fields are not both true."""
CHAT_FIELDS = Table(
    Field("messages", MESSAGES, None, "required; a `role` and a `content` each, a string or a list of texts"),
    Field("max_tokens", integer(1, MAX_MAX_TOKENS), None, MAX_TOKENS_ABOUT),
    Field("max_completion_tokens", integer(1, MAX_MAX_TOKENS), None, OTHER_NAME),
    Field("add_generation_prompt", BOOLEAN, None, BEGINS_ABOUT),
    Field("continue_final_message", BOOLEAN, False, "the answer continues the last message"),
    Field("chat_template_kwargs", ANY_OBJECT, {}, OPTIONS_ABOUT),
    Field("add_special_tokens", BOOLEAN, False, f"{SPECIAL_TOKENS}, beside those of the template"),
    Field("tools", TOOLS, [], TOOLS_ABOUT),
    Field("tool_choice", TOOL_CHOICE, None, TOOL_CHOICE_ABOUT),
    *GENERATION_FIELDS,
    Field("logprobs", BOOLEAN, False, "how likely each token was, before anything changed logits"),
    Field("top_logprobs", integer(0, MAX_LOGPROBS), None, "so many of the likeliest, too; only with `logprobs`"),
    Field("reasoning_effort", one_of(*EFFORTS), None, EFFORT_ABOUT),
    Field("thinking_token_budget", integer(UNLIMITED, MAX_MAX_TOKENS), None, BUDGET_ABOUT),
    Field("include_reasoning", BOOLEAN, True, REASONING_ABOUT),
    Field("verbosity", LEVELS, None, TAKEN),
    Field("store", BOOLEAN, None, f"{TAKEN}: nothing is stored"),
    Field("metadata", ANY_OBJECT, None, TAKEN),
    Field("prompt_cache_key", string(MAX_KEY_CHARS), None, TAKEN),
    Field("prompt_cache_retention", string(MAX_KEY_CHARS), None, TAKEN),
    Field("safety_identifier", string(MAX_KEY_CHARS), None, TAKEN),
    Field("service_tier", one_of(*TIERS), None, TAKEN),
    Field("chat_template", only(remedy="the model's own is used, never a client's")),
    Field("enable_thinking", only(remedy="send it in chat_template_kwargs")),
    Field("parallel_tool_calls", BOOLEAN, True, PARALLEL_ABOUT),
    Field("functions", only([], remedy="send tools")),
    Field("function_call", only("none", "auto", remedy="send tool_choice")),
    Field("documents", only([])),
    Field("echo", only(False)),
    Field("prompt_logprobs", only()),
    Field("modalities", only(["text"], remedy="this model writes text only")),
    Field("audio", only(remedy="this model writes text only")),
    Field("prediction", only()),
    Field("web_search_options", only()),
    relations=[
        STREAMED,
        {"anyOf": [{"properties": {"top_logprobs": {"enum": [0, None]}}}, given("logprobs", {"const": True})]},
        ONE_BEGINNING,
    ],
)
