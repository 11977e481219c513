"""Types of a response of /v1/responses, shown as JSON schema in `/openapi.json`."""

from typing import Literal, NotRequired, TypedDict

from common.base.json_file import Json, JsonObject
from router.base.shapes import ChatToken, ResponseWarning


class InputTokensDetails(TypedDict):
    cached_tokens: int  # input tokens with cached KV, not computed
    cache_write_tokens: int  # always 0, because nothing is charged


class OutputTokensDetails(TypedDict):
    reasoning_tokens: int


class ResponseUsage(TypedDict):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class OutputText(TypedDict):
    type: Literal["output_text"]
    text: str
    annotations: list[Json]
    logprobs: list[ChatToken]


class ReasoningText(TypedDict):
    type: Literal["reasoning_text"]
    text: str


class SummaryText(TypedDict):
    type: Literal["summary_text"]
    text: str


class OutputMessage(TypedDict):
    type: Literal["message"]
    id: str
    role: Literal["assistant"]
    content: list[OutputText]
    status: Literal["completed", "incomplete"]


class ReasoningItem(TypedDict):
    type: Literal["reasoning"]
    id: str
    summary: list[SummaryText]
    content: NotRequired[list[ReasoningText]]  # absent beside a summary
    status: Literal["completed", "incomplete"]


class FunctionCall(TypedDict):
    type: Literal["function_call"]
    id: str
    call_id: str
    name: str
    arguments: str
    status: Literal["completed", "incomplete"]


class ResponseError(TypedDict):
    code: str
    message: str


class IncompleteDetails(TypedDict):
    reason: Literal["max_output_tokens"]


class ResponseBody(TypedDict):
    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    model: str
    status: Literal["completed", "incomplete"]
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    output: list[OutputMessage | ReasoningItem | FunctionCall]
    usage: ResponseUsage
    background: Literal[False]
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: None
    prompt_cache_key: str | None
    reasoning: dict[str, str | None]
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: Literal[False]
    temperature: float
    text: JsonObject
    tool_choice: Json
    tools: list[JsonObject]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    user: str | None
    warnings: NotRequired[list[ResponseWarning]]  # parts of a form without effect on texts
