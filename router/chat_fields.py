"""The table of fields of /v1/chat/completions: those of completions, and what a conversation needs."""

from dataclasses import dataclass
from typing import Any

from common.wire.output_token import MAX_LOGPROBS
from router.chat_messages import MESSAGES, Tools
from router.completion_fields import GENERATION_FIELDS, MAX_MAX_TOKENS, SPECIAL_TOKENS
from router.json_fields import Field, Table
from router.json_rules import Boolean, Integer, Only, Text, wrong
from router.tool_choice import ToolChoice

MAX_KEY_CHARS = 512
MAX_TOKENS_ABOUT = "of each answer at most; refused if it exceeds the context; without it, what is left of the context"
OTHER_NAME = "OpenAI's newer name of `max_tokens`; at most one of them, or both alike"
BEGINS_ABOUT = "the prompt ends with what begins an answer; without it, it does unless a message is continued"
OPTIONS_ABOUT = "variables of the model's chat template, as `enable_thinking`; refused if it has none of that name"
TOOL_CHOICE_ABOUT = (
    "none: the template does not get the tools; required: the answer is calls, of the one that is named if one is, "
    "with arguments that are valid by its `parameters`"
)
PARALLEL_ABOUT = "false: at most one call"
TOOLS_ABOUT = (
    "functions for the template to show; calls are told apart in the formats of Qwen3 and Llama 3; those of a `strict` "
    "one have valid arguments"
)


@dataclass(frozen=True, slots=True)
class Options:
    """A rule: an object with whatever values."""

    wants = "an object"

    @property
    def schema(self) -> dict[str, Any]:
        return {"type": "object"}

    def checked(self, name: str, value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise wrong(name, value, self.wants)
        return value


CHAT_FIELDS = Table(
    Field("messages", MESSAGES, None, "required; each with `role` and `content`, a string or a list of texts"),
    Field("max_tokens", Integer(1, MAX_MAX_TOKENS), None, MAX_TOKENS_ABOUT),
    Field("max_completion_tokens", Integer(1, MAX_MAX_TOKENS), None, OTHER_NAME),
    Field("add_generation_prompt", Boolean(), None, BEGINS_ABOUT),
    Field("continue_final_message", Boolean(), False, "the answer continues the last message"),
    Field("chat_template_kwargs", Options(), {}, OPTIONS_ABOUT),
    Field("add_special_tokens", Boolean(), False, f"{SPECIAL_TOKENS}, beside those of the template"),
    Field("tools", Tools(), [], TOOLS_ABOUT),
    Field("tool_choice", ToolChoice(), "auto", TOOL_CHOICE_ABOUT),
    *GENERATION_FIELDS,
    Field("logprobs", Boolean(), False, "how likely each token was, before anything changed logits"),
    Field("top_logprobs", Integer(0, MAX_LOGPROBS), None, "so many of the likeliest, too; only with `logprobs`"),
    Field("safety_identifier", Text(MAX_KEY_CHARS), None, "taken, without effect"),
    Field("prompt_cache_key", Text(MAX_KEY_CHARS), None, "taken, without effect"),
    Field("chat_template", Only((), "the model's own is used, never a client's")),
    Field("parallel_tool_calls", Boolean(), True, PARALLEL_ABOUT),
    Field("functions", Only(([],), "send tools")),
    Field("function_call", Only(("none", "auto"), "send tool_choice")),
    Field("documents", Only(([],))),
    Field("echo", Only((False,))),
    Field("prompt_logprobs", Only()),
    Field("reasoning_effort", Only()),
    Field("verbosity", Only()),
    Field("modalities", Only((["text"],), "this model writes text only")),
    Field("audio", Only((), "this model writes text only")),
    Field("prediction", Only()),
    Field("web_search_options", Only()),
    Field("store", Only((False,), "nothing is stored")),
    Field("metadata", Only(({},), "nothing is stored")),
    Field("service_tier", Only(("auto", "default"))),
)
