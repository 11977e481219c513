"""OpenAI's chat API: makes a checked request of a JSON body; the model's chat template writes the prompt."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from common.base.errors import RequestError
from common.base.json_file import Json, JsonObject
from router.base.json_fields import Values
from router.base.json_rules import wrong
from router.grammar.source import ANYTHING, NO_GRAMMAR, GrammarSource
from router.requests.chat_fields import CHAT_FIELDS, NO_EFFORT, UNLIMITED
from router.requests.completion_api import CompletionRequest, check_model, json_object, request_of
from router.requests.completion_fields import MAX_MAX_TOKENS
from router.requests.tool_choice import AUTO, NONE, forced_names, form_of
from router.text.chat_model import ChatModel
from router.text.chat_template import ChatTemplate, template_error
from router.text.control_tokens import new_mark
from router.text.formats.registry import FORMATS, thoughts_behind
from router.text.formats.shapes import SHAPES, THINK_TAGS, Thoughts, ThoughtTags, ToolFormat
from router.text.prompts import MAX_CHARS_PER_TOKEN

Conversation = Sequence[JsonObject]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """The prompt written by the model's template from a conversation."""

    text: str
    mark: str  # see `control_tokens`; empty without a mark
    template: ChatTemplate
    has_tools: bool

    @property
    def thoughts(self) -> Thoughts:
        """Thoughts before the answer: begun, possible or none."""
        tags = self.template.tags
        return "" if tags is None else thoughts_behind(self.text, tags)

    @property
    def tags(self) -> ThoughtTags:
        return self.template.tags or THINK_TAGS

    @property
    def tool_format(self) -> ToolFormat:
        """Format in which the answer is read: that of calls if there are tools, or of all answers of the model."""
        found = self.template.tool_format
        return found if self.has_tools or found is ToolFormat.HARMONY else ToolFormat.NONE

    @property
    def header(self) -> str:
        """Text before an answer without calls."""
        is_inside = self.template.tool_format is ToolFormat.HARMONY and not self.thoughts  # a message that is continued
        return "" if is_inside or self.tool_format is ToolFormat.NONE else SHAPES[self.tool_format].header


def parse_chat(body: Json, model: ChatModel, max_model_len: int) -> CompletionRequest:
    """Check every field and write the prompt; raise RequestError naming the first wrong field."""
    values = CHAT_FIELDS.read(json_object(body))
    check_model(values["model"], model.info.name)
    CHAT_FIELDS.require("messages", values)
    return chat_request(values, model, max_model_len)


def chat_request(values: Values, model: ChatModel, max_model_len: int) -> CompletionRequest:
    """Make the request of checked values of all fields; raise RequestError like `parse_chat`."""
    info, max_tokens = model.info, _max_tokens(values)
    shared = values | {
        "echo": False,
        "logprobs": _num_likeliest(values),
        "max_tokens": MAX_MAX_TOKENS if max_tokens is None else max_tokens,
    }
    request = request_of(shared, (), max_tokens, info.vocab_size, info.eos_token_ids)
    prompt = write_prompt(values, model, max_model_len)
    response = replace(
        request.response,
        thoughts=prompt.thoughts,
        tags=prompt.tags,
        tells_thoughts=values["include_reasoning"],
        tool_format=prompt.tool_format.value,
        takes_calls=prompt.has_tools,
        forced=forced_names(values),
        tool_schemas=_tool_schemas(prompt, values),
    )
    encoding = replace(request.encoding, mark=prompt.mark)
    kept = (*(prompt.tags[:2] if prompt.thoughts else ()), *FORMATS[prompt.tool_format].tokens)
    return replace(
        request,
        prompts=[prompt.text],
        encoding=encoding,
        text=replace(request.text, kept=kept),
        response=response,
        usual_max_tokens=MAX_MAX_TOKENS,
        grammar=_grammar(values, prompt, request.grammar),
    )


def _tool_schemas(prompt: ChatPrompt, values: Values) -> str:
    """Return the JSON of the tools' parameters if values of calls are written without types; else that of nothing."""
    if not prompt.has_tools or prompt.template.tool_format is not ToolFormat.XML:
        return "{}"
    functions = (tool["function"] for tool in values["tools"])
    return json.dumps({each["name"]: each.get("parameters") or {} for each in functions})


def _grammar(values: Values, prompt: ChatPrompt, asked: GrammarSource) -> GrammarSource:
    """Return the grammar of the answer, which applies behind the thoughts."""
    budget = values["thinking_token_budget"] if prompt.thoughts else None
    most = None if budget == UNLIMITED else budget
    source = form_of(values, prompt.template.tool_format, asked, NO_GRAMMAR if most is None else ANYTHING)
    if not source.kind:
        return source
    header = "" if source.kind == "calls" else prompt.header
    return replace(source, thoughts=prompt.thoughts, tags=prompt.tags, header=header, max_thought_tokens=most)


def write_prompt(values: Values, model: ChatModel, max_model_len: int) -> ChatPrompt:
    """Write a conversation's prompt; raise RequestError if the template refuses. Call in the main thread."""
    template = template_of(model)
    if "add_generation_prompt" in values["chat_template_kwargs"]:
        message = "add_generation_prompt as a field of the request"
        raise wrong("chat_template_kwargs", values["chat_template_kwargs"], message)
    said = {name: values[name] for name in ("messages", "chat_template_kwargs")} | {"tools": _tools(template, values)}
    mark = new_mark()
    try:
        said = model.control_tokens.broken(said, mark)
    except RecursionError:
        raise template_error("it is nested too deep") from None
    text = _prompt(template, values | said, MAX_CHARS_PER_TOKEN * max_model_len)
    if not text:
        raise template_error("it writes nothing")
    return ChatPrompt(text, mark if mark in text else "", template, bool(said["tools"]))


def template_of(model: ChatModel) -> ChatTemplate:
    """Return the model's chat template; raise RequestError for a model without a template."""
    if model.chat_template is None:
        message = f"the model {model.info.name!r:.80} has no chat template; use /v1/completions"
        raise RequestError(message, param="messages", code="no_chat_template")
    return model.chat_template


def _tools(template: ChatTemplate, values: Values) -> list[Json]:
    """Return the tools for the template; raise RequestError if the format of calls is unknown."""
    tools: list[Json] = [] if (values["tool_choice"] or AUTO) == NONE else values["tools"]
    if tools and template.tool_format is ToolFormat.NONE:
        formats = "Qwen3, Qwen3.5, Llama 3, Mistral, gpt-oss and Gemma 4"
        message = f"tools: the model's chat template asks for calls in none of the formats of {formats}; leave it out"
        raise RequestError(message, param="tools", code="unsupported_value")
    return tools


def _prompt(template: ChatTemplate, values: Values, max_chars: int) -> str:
    continues, begins = values["continue_final_message"], values["add_generation_prompt"]
    if continues and begins:
        raise wrong("continue_final_message", True, "false where add_generation_prompt is true")
    options = {"add_generation_prompt": not continues if begins is None else begins, **values["chat_template_kwargs"]}
    found = FORMATS[template.tool_format]
    render = partial(
        template.render,
        options=options,
        max_chars=max_chars,
        tools=found.tools(values["tools"]),
        wishes=_wishes(values),
    )
    messages = found.history(_known_roles(template, values["messages"]), template.source)
    if not continues:
        return render(messages)
    *before, last = messages
    mark = new_mark()
    written = render([*before, last | {"content": last["content"] + mark}])
    if mark not in written:
        raise template_error("it does not write the last message, so nothing can continue it")
    return written[: written.rindex(mark)]


def _wishes(values: Values) -> JsonObject:
    """Return template variables about the effort of thinking."""
    effort = values["reasoning_effort"]
    return {} if effort is None else {"reasoning_effort": effort, "enable_thinking": effort != NO_EFFORT}


def _known_roles(template: ChatTemplate, messages: Conversation) -> Conversation:
    """Give a developer the system's role, if the template does not know developers.

    Many templates leave out messages of unknown roles.
    """
    if "developer" in template.source:
        return messages
    return [each | {"role": "system"} if each["role"] == "developer" else each for each in messages]


def _max_tokens(values: Values) -> int | None:
    asked: set[int] = {values["max_tokens"], values["max_completion_tokens"]} - {None}
    if len(asked) > 1:
        wants = f"what max_tokens is, {values['max_tokens']}; leave one of them out"
        raise wrong("max_completion_tokens", values["max_completion_tokens"], wants)
    return asked.pop() if asked else None


def _num_likeliest(values: Values) -> int | None:
    """Return the number of likeliest tokens to tell; None if log-probabilities are not requested."""
    if values["top_logprobs"] and not values["logprobs"]:
        raise wrong("top_logprobs", values["top_logprobs"], "logprobs = true, or 0")
    return int(values["top_logprobs"] or 0) if values["logprobs"] else None
