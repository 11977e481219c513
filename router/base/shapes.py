"""Types of response bodies; `/openapi.json` shows each as JSON schema."""

from types import NoneType, UnionType
from typing import (
    Any,
    Literal,
    NotRequired,
    TypeAlias,
    TypedDict,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from common.base.json_file import Json, JsonObject

TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", NoneType: "null"}


class PromptTokensDetails(TypedDict):
    cached_tokens: int  # prompt tokens with cached KV, not computed


class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class LogprobsBody(TypedDict):
    tokens: list[str]
    token_logprobs: list[float | None]  # null for the first token of a prompt
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(TypedDict):
    logprob: float
    rank: int
    decoded_token: str


class Choice(TypedDict):
    index: int
    text: str
    logprobs: LogprobsBody | None
    finish_reason: Literal["stop", "length"]
    stop_reason: str | int | None
    prompt_token_ids: NotRequired[list[int]]
    token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[list[dict[str, PromptLogprob] | None]]


class ResponseWarning(TypedDict):
    code: Literal["keyword_dropped"]
    message: str
    param: str  # request field


class CompletionBody(TypedDict):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    warnings: NotRequired[list[ResponseWarning]]  # parts of schemas not enforced


class LikelyToken(TypedDict):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatToken(LikelyToken):
    top_logprobs: list[LikelyToken]


class ChatLogprobs(TypedDict):
    content: list[ChatToken]
    refusal: None


class CalledFunction(TypedDict):
    name: str
    arguments: str


class ToolCall(TypedDict):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(TypedDict):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall]]


class ChatChoice(TypedDict):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: str | int | None
    token_ids: NotRequired[list[int]]


class ChatBody(TypedDict):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: NotRequired[list[int]]
    warnings: NotRequired[list[ResponseWarning]]  # parts of schemas not enforced


class Event(TypedDict):
    """Event of a stream; `data` is JSON, or `[DONE]`."""

    data: str


class Error(TypedDict):
    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(TypedDict):
    error: Error


class Model(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[Model]


class Tokens(TypedDict):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str | None] | None


class PromptText(TypedDict):
    prompt: str


class Live(TypedDict):
    status: Literal["ok"]


StatusName: TypeAlias = Literal["ok", "degraded", "draining", "unavailable"]


class Health(TypedDict):
    version: str  # the router's
    status: StatusName  # completions are answered if ok or degraded
    problems: list[str]  # reasons for another status than ok
    workers: dict[str, list[JsonObject]]
    kv_paths: list[JsonObject]
    memory_servers: list[JsonObject]
    role_changes: list[JsonObject]  # latest first


class StatusReport(TypedDict):
    version: str
    model: str
    max_model_len: int
    has_chats: bool
    now_s: float  # wall clock
    up_s: float
    status: StatusName
    problems: list[str]
    queued: int
    queued_prompt_tokens: int
    running: int
    phases: dict[str, int]
    kv_usage: float  # share of KV blocks in use; 1 is full
    longest: list[JsonObject]  # running requests, oldest first
    slowest: list[JsonObject]  # requests ended in the last five minutes, longest first
    devices: list[JsonObject]
    kv_paths: list[JsonObject]  # perhaps not all; see `num_kv_paths`
    num_kv_paths: int
    period_s: float
    history: dict[str, list[Json]]  # columns by name, oldest first
    incidents: list[JsonObject]  # latest first


class Version(TypedDict):
    version: str
    wire: str


class Load(TypedDict):
    server_load: int


def schema_of(kind: Any) -> JsonObject:
    """Return the JSON schema of a type in this module, or of a part of such types; raises TypeError for others."""
    if kind is Json:
        return {}
    if kind in TYPES:
        return {"type": TYPES[kind]}
    if is_typeddict(kind):
        properties = {name: schema_of(hint) for name, hint in get_type_hints(kind).items()}
        return {"type": "object", "properties": properties, "required": sorted(kind.__required_keys__)}
    origin, args = get_origin(kind), get_args(kind)
    if origin is Literal:
        return {"enum": list(args)}
    if origin is list:
        return {"type": "array", "items": schema_of(args[0])}
    if origin is dict:
        return {"type": "object", "additionalProperties": schema_of(args[1])}
    if origin in (Union, UnionType):
        return {"anyOf": [schema_of(arg) for arg in args]}
    raise TypeError(f"no JSON schema for {kind}")
