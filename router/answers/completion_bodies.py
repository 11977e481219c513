"""Response bodies of /v1/completions, whole and as server-sent events.

Streams write an event for each token, thousands a second. So everything of a chunk except the text is made once for
each choice.
"""

import json
from collections.abc import Mapping
from json.encoder import encode_basestring_ascii
from typing import NamedTuple

from common.base.json_file import Json, JsonObject
from router.base.shapes import Usage
from router.dispatch.completion.choice import Choice, Delivery
from router.requests.completion_api import ResponseOptions
from router.text.logprobs import LogprobLog, TokenStrings
from router.text.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"


class PromptParts(NamedTuple):
    """Prompt log-probabilities of a choice, as JSON; empty if not requested."""

    echoed: dict[str, str]  # items of each list in `logprobs`, before the outputs' items
    prompt_logprobs: str  # the field `prompt_logprobs`


NO_PARTS = PromptParts({}, "")


async def choice_body(text: str, choice: Choice, options: ResponseOptions) -> JsonObject:
    """Return a choice of a whole response."""
    log = choice.logprobs
    body = {
        "index": choice.spec.index,
        "text": text,
        "logprobs": log and log.part(0, len(choice.output.token_ids)),
    }
    return body | ending_of(choice, options) | prompt_body(choice, options)


def ending_of(choice: Choice, options: ResponseOptions) -> JsonObject:
    """Return the fields behind the text, common to choices of all kinds."""
    ids = {"token_ids": choice.output.token_ids} if options.token_ids else {}
    return {"finish_reason": choice.output.finish_reason, "stop_reason": choice.stop_reason} | ids


def prompt_body(choice: Choice, options: ResponseOptions) -> JsonObject:
    """Return the prompt's token ids for a choice, if requested; a chat has the ids beside its choices."""
    return {"prompt_token_ids": list(choice.spec.prompt_ids)} if options.token_ids else {}


def usage_of(num_prompt_tokens: int, num_output_tokens: int, num_cached_tokens: int) -> Usage:
    """Return token counts; each prompt counts once, whatever its number of choices.

    `num_cached_tokens` are prompt tokens found in a cache, not computed.
    """
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
    }


def warnings_json(options: ResponseOptions) -> str:
    """Return the field `warnings` as JSON, to stand behind other fields; empty without warnings."""
    return f', "warnings": {json.dumps(options.warnings)}' if options.warnings else ""


class ChunkWriter:
    """Server-sent events of a choice."""

    def __init__(self, head: JsonObject, options: ResponseOptions, choice: Choice) -> None:
        self._choice = choice
        self._options = options
        self._num_sent = 0  # tokens
        self.prompt = NO_PARTS  # log-probabilities of the prompt, for the first event
        self._warnings = warnings_json(options)
        self._before = f'data: {json.dumps(head)[:-1]}, "choices": [{{"index": {choice.spec.index}, '
        self._tells_tokens = choice.logprobs is not None or options.token_ids or options.continuous_usage
        usage = ', "usage": null' if options.include_usage else ""
        self._behind_text = f', "logprobs": null, "finish_reason": null}}]{usage}}}\n\n'

    def chunk(self, delivery: Delivery) -> bytes:
        """Return an event; only a choice's last event has a finish reason and a stop reason."""
        content = self._content(delivery)
        tells_more = self._tells_tokens or self._warnings or delivery.finish_reason is not None
        after = self._after(delivery) if tells_more else self._behind_text
        self._num_sent = delivery.num_outputs
        return (self._before + content + after).encode("ascii")

    def _after(self, delivery: Delivery) -> str:
        """Return all behind the text; call after `_content`."""
        reason = "null"
        if delivery.finish_reason is not None:
            stop = json.dumps(self._choice.stop_reason)
            reason = f'"{self._finish_reason(delivery.finish_reason)}", "stop_reason": {stop}'
        ids = self._token_ids(delivery) if self._options.token_ids else ""
        logprobs = self._logprobs(delivery)
        return f', "logprobs": {logprobs}, "finish_reason": {reason}{ids}}}]{self._rest(delivery)}}}\n\n'

    def _content(self, delivery: Delivery) -> str:
        """Return the field with the text."""
        return f'"text": {encode_basestring_ascii(delivery.text)}'

    def _finish_reason(self, reason: str) -> str:
        """Return the reason in the API's words; call after `_content`."""
        return reason

    def _logprobs(self, delivery: Delivery) -> str:
        """Return log-probabilities of the tokens since the last event."""
        log = self._choice.logprobs
        if log is None:
            return "null"
        echoed = {} if self._num_sent else self.prompt.echoed
        return _behind(echoed, self._part(log, self._num_sent, delivery.num_outputs))

    @staticmethod
    def _part(log: LogprobLog, begin: int, end: int) -> Mapping[str, Json]:
        return log.part(begin, end)

    def _token_ids(self, delivery: Delivery) -> str:
        """Return ids since the last event; the first event also has the prompt's ids."""
        ids = {"token_ids": self._choice.output.token_ids[self._num_sent : delivery.num_outputs]}
        extra = self._prompt_body() if self._num_sent == 0 else {}
        return f", {json.dumps(ids | extra)[1:-1]}"

    def _prompt_body(self) -> JsonObject:
        """Return the fields about the prompt in a choice's first event."""
        return prompt_body(self._choice, self._options)

    def _rest(self, delivery: Delivery) -> str:
        """Return the fields beside `choices`.

        Warnings are in the first event, because clients' libraries keep fields of the first event.
        """
        warnings, self._warnings = self._warnings, ""
        return warnings + self._usage(delivery)

    def _usage(self, delivery: Delivery) -> str:
        if self._options.continuous_usage:
            choice = self._choice
            usage = usage_of(len(choice.spec.prompt_ids), delivery.num_outputs, choice.output.num_cached)
            return f', "usage": {json.dumps(usage)}'
        return ', "usage": null' if self._options.include_usage else ""


class PromptShaper:
    """Shaper of prompt log-probabilities for all choices of an HTTP request; finds token names once."""

    def __init__(self, tokenizer: Tokenizer, options: ResponseOptions, strings: TokenStrings) -> None:
        self._tokenizer = tokenizer
        self._options = options
        self._strings = strings

    async def parts(self, choice: Choice) -> PromptParts:
        """Return the parts of a choice with a computed prompt; gives way to other tasks meanwhile."""
        log, options = choice.output.prompt_log, self._options
        if log is None:
            return NO_PARTS
        echoed, prompt_logprobs = NO_PARTS
        if num_echoed := options.num_echoed_logprobs:
            # A prompt sent as text may have special tokens around it, but its echo has none.
            is_decoded = self._tokenizer.decode_prompt(choice.spec.prompt_ids) == choice.spec.echo
            decode = self._tokenizer.decode_all if is_decoded else self._tokenizer.decode
            echoed = await log.echoed(self._strings, decode, num_echoed)
        if options.num_prompt_logprobs:
            prompt_logprobs = await log.told(self._strings, options.num_prompt_logprobs)
        return PromptParts(echoed, prompt_logprobs)


def choice_json(choice: JsonObject, prompt: PromptParts) -> str:
    """Return the JSON of a choice with log-probabilities of its prompt."""
    if prompt is NO_PARTS:
        return json.dumps(choice)
    others = {name: value for name, value in choice.items() if name != "logprobs"}
    part = choice["logprobs"]
    logprobs = "null" if part is None else _behind(prompt.echoed, part)
    extra = f', "prompt_logprobs": {prompt.prompt_logprobs}' if prompt.prompt_logprobs else ""
    return f'{json.dumps(others)[:-1]}, "logprobs": {logprobs}{extra}}}'


def _behind(echoed: Mapping[str, str], part: Mapping[str, Json]) -> str:
    """Return the JSON of `part`; each list of outputs stands behind the list of the echoed prompt."""
    if not echoed:
        return json.dumps(part)
    items = {name: filter(None, (echoed[name], json.dumps(values)[1:-1])) for name, values in part.items()}
    lists = (f'"{name}": [' + ", ".join(written) + "]" for name, written in items.items())
    return "{" + ", ".join(lists) + "}"


def event(body: Mapping[str, object]) -> bytes:
    """Return a server-sent event with a JSON body."""
    return f"data: {json.dumps(body)}\n\n".encode("ascii")
