"""OpenAI's completions API: makes a checked request of a JSON body.

Everything is validated here, before the first byte of a response. `completion_fields` defines each field. Combinations
of fields are checked here.
"""

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace

from msgspec import structs

from common.base.errors import RequestError
from common.base.json_file import Json, JsonObject
from common.wire.values.packing import pack_ids
from common.wire.values.sampling_params import SamplingParams
from router.base.json_fields import Values
from router.base.json_rules import shown, wrong
from router.base.shapes import ResponseWarning
from router.grammar.source import NO_GRAMMAR, CompileResult, GrammarSource
from router.requests.completion_fields import COMPLETION_FIELDS
from router.requests.structured_fields import grammar_source
from router.text.formats.shapes import THINK_TAGS, Thoughts, ThoughtTags
from router.text.prompts import DEFAULT_MAX_TOKENS, Encoding, Prompt, check_vocabulary

SEED_BITS = 63


@dataclass(frozen=True, slots=True)
class TextOptions:
    """Options for making a choice's text of tokens, and for ending the text."""

    stops: tuple[str, ...]
    stop_token_ids: tuple[int, ...]  # named by the client, without end-of-text tokens
    include_stop: bool
    skip_special_tokens: bool
    echo: bool  # the prompt stands before the text
    kept: tuple[str, ...] = ()  # special tokens that have a text all the same, because a chat's answer is read by them


@dataclass(frozen=True, slots=True)
class ResponseOptions:
    """Options for the shape of the response."""

    stream: bool
    include_usage: bool  # in a stream's last chunk
    continuous_usage: bool  # in each chunk
    token_ids: bool  # of prompt and text, in each choice
    tokens_as_ids: bool  # tokens are named by ids instead of strings
    num_echoed_logprobs: int = 0  # log-probabilities of each prompt token in `logprobs`
    num_prompt_logprobs: int = 0  # log-probabilities of each prompt token in `prompt_logprobs`
    thoughts: Thoughts = ""  # thoughts before a chat's answer
    tags: ThoughtTags = THINK_TAGS  # around the thoughts
    tells_thoughts: bool = True
    tool_format: str = ""  # of a chat; see `formats.shapes.ToolFormat`
    takes_calls: bool = True  # a chat has tools
    forced: tuple[str, ...] = ()  # names of tools from which a forced call must choose
    tool_schemas: str = "{}"  # JSON object of parameters' schemas by tool, for a format whose values have no type
    warnings: tuple[ResponseWarning, ...] = ()
    repeated: str = "{}"  # JSON object of request fields repeated by /v1/responses
    has_summary: bool = False  # of /v1/responses: thoughts come as a summary

    @property
    def num_scores(self) -> int:
        """Number of log-probabilities to compute for each prompt token."""
        return max(self.num_echoed_logprobs, self.num_prompt_logprobs)


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A valid request; `max_tokens` is still to be fitted to each prompt (`prompts.fit_max_tokens`).

    `make_job` sets `max_tokens` and `seed` of `sampling` for each choice.
    """

    prompts: Sequence[Prompt]
    encoding: Encoding
    sampling: SamplingParams
    max_tokens: int | None  # None: `usual_max_tokens`, or the rest of the context
    n: int
    text: TextOptions
    response: ResponseOptions
    client: str  # the field `user`; may be empty
    priority: int  # lower is earlier
    usual_max_tokens: int = DEFAULT_MAX_TOKENS
    bad_words: tuple[str, ...] = ()  # moved to `sampling` once prompts are tokens
    grammar: GrammarSource = NO_GRAMMAR  # of the text; becomes part of `sampling` when compiled
    echoes: tuple[str, ...] = ()  # texts to repeat, a text per prompt, once prompts are tokens
    cache_salt: str = ""
    owner: str = ""  # name of the API key, if keys are required

    @property
    def salt(self) -> bytes:
        """Salt of block keys: KV is shared only among requests with equal API key and `cache_salt`."""
        named = f"{self.owner}/{self.cache_salt}"  # no salt has a slash
        return hashlib.sha256(named.encode()).digest() if self.owner or self.cache_salt else b""


def parse(body: Json, model_name: str, vocab_size: int, eos_token_ids: tuple[int, ...]) -> CompletionRequest:
    """Check every field; raise RequestError naming the first wrong field."""
    values = COMPLETION_FIELDS.read(json_object(body))
    check_model(values["model"], model_name)
    COMPLETION_FIELDS.require("prompt", values)
    if values["best_of"] not in (None, 0, 1, values["n"]):
        raise wrong("best_of", values["best_of"], f"0, 1 or what n is, {values['n']}: no text is made and not returned")
    if values["max_tokens"] == 0 and not values["echo"]:
        raise wrong("max_tokens", 0, "at least 1, or echo = true")
    asked = None if body.get("max_tokens") is None else values["max_tokens"]
    for prompt in values["prompt"]:
        if not isinstance(prompt, str):
            check_vocabulary("prompt", prompt, vocab_size)
    return request_of(values, values["prompt"], asked, vocab_size, eos_token_ids)


def request_of(
    values: Values,
    prompts: Sequence[Prompt],
    max_tokens: int | None,
    vocab_size: int,
    eos_token_ids: tuple[int, ...],
) -> CompletionRequest:
    """Make a request of checked values of the completion fields, and of arguments specific to an API."""
    for name in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
        check_vocabulary(name, tuple(values[name] or ()), vocab_size)
    own_ids = () if values["ignore_eos"] else eos_token_ids
    return CompletionRequest(
        prompts=prompts,
        encoding=_encoding(values),
        sampling=_sampling(values, own_ids),
        max_tokens=max_tokens,
        n=values["n"],
        text=_text_options(values, own_ids),
        response=_response_options(values),
        client=values["user"],
        priority=values["priority"],
        cache_salt=values["cache_salt"] or "",
        bad_words=values["bad_words"],
        grammar=grammar_source(values),
    )


def with_grammar(request: CompletionRequest, found: CompileResult) -> CompletionRequest:
    """Return the request with its compiled grammar, and a warning for each keyword without effect on texts."""
    if found == CompileResult():
        return request
    field = request.grammar.field
    warnings = tuple(ResponseWarning(code="keyword_dropped", message=each, param=field) for each in found.dropped)
    return replace(
        request,
        sampling=structs.replace(request.sampling, grammar=found.grammar),
        response=replace(request.response, warnings=warnings),
    )


def json_object(body: Json) -> JsonObject:
    """Return the body if an object; raise RequestError for anything else."""
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object", code="invalid_json")
    return body


def choice_seed(seed: int, choice: int) -> int:
    """Return the seed of a prompt's `choice`-th text; the first text has the request's own seed."""
    if choice == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}:{choice}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - SEED_BITS)


def check_model(model: str | None, model_name: str) -> None:
    """Raise RequestError (404) for any model other than the served model; None means any."""
    if model is not None and model != model_name:
        raise RequestError(
            f"model {shown(model)} does not exist here; this server has {model_name!r}",
            param="model",
            code="model_not_found",
            status=404,
        )


def _encoding(values: Values) -> Encoding:
    return Encoding(
        add_special_tokens=values["add_special_tokens"],
        max_tokens=values["truncate_prompt_tokens"],
        keep_end=values["truncation_side"] == "left",
        salt=values["cache_salt"] or "",
    )


def _text_options(values: Values, eos_token_ids: tuple[int, ...]) -> TextOptions:
    return TextOptions(
        stops=values["stop"],
        stop_token_ids=tuple(token_id for token_id in values["stop_token_ids"] if token_id not in eos_token_ids),
        include_stop=values["include_stop_str_in_output"],
        skip_special_tokens=values["skip_special_tokens"],
        echo=values["echo"],
    )


def _sampling(values: Values, eos_token_ids: tuple[int, ...]) -> SamplingParams:
    seed = secrets.randbits(SEED_BITS) if values["seed"] is None else values["seed"]
    return SamplingParams(
        temperature=values["temperature"],
        top_k=max(0, values["top_k"]),
        top_p=values["top_p"],
        min_p=values["min_p"],
        seed=seed % (1 << SEED_BITS),
        stop_token_ids=_stop_ids(values, eos_token_ids),
        presence_penalty=values["presence_penalty"],
        frequency_penalty=values["frequency_penalty"],
        repetition_penalty=values["repetition_penalty"],
        min_tokens=_min_tokens(values),
        num_logprobs=_num_logprobs(values),
        biased_token_ids=tuple(values["logit_bias"]),
        biases=tuple(values["logit_bias"].values()),
        allowed_token_ids=_allowed_ids(values, eos_token_ids),
    )


def _stop_ids(values: Values, eos_token_ids: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(dict.fromkeys((*eos_token_ids, *values["stop_token_ids"])))


def _min_tokens(values: Values) -> int:
    num_tokens, most = values["min_tokens"], values["max_tokens"]
    if num_tokens > most:
        raise wrong("min_tokens", num_tokens, f"at most max_tokens, {most}")
    return int(num_tokens)


def _num_logprobs(values: Values) -> int:
    """Return the number of log-probabilities per token: the likeliest tokens' and the chosen token's."""
    return 0 if values["logprobs"] is None else int(values["logprobs"]) + 1


def _allowed_ids(values: Values, eos_token_ids: tuple[int, ...]) -> bytes:
    """Return the allowed tokens in wire format; empty if all are allowed."""
    allowed = values["allowed_token_ids"]
    if allowed is None:
        return b""
    if values["min_tokens"] and set(allowed) <= set(_stop_ids(values, eos_token_ids)):
        raise wrong("allowed_token_ids", allowed, "with min_tokens, at least one token that does not end the text")
    return pack_ids(sorted(set(allowed)))


def _response_options(values: Values) -> ResponseOptions:
    options = values["stream_options"]
    if options is not None and not values["stream"]:
        message = "stream_options only with stream = true; leave it out or stream"
        raise RequestError(message, param="stream_options")
    if values["prompt_logprobs"] is not None and values["stream"]:
        message = "prompt_logprobs is told only with stream = false; do not stream, or send echo and logprobs"
        raise RequestError(message, param="prompt_logprobs")
    return ResponseOptions(
        stream=values["stream"],
        include_usage=options is not None and options["include_usage"],
        continuous_usage=options is not None and options["continuous_usage_stats"],
        token_ids=values["return_token_ids"],
        tokens_as_ids=values["return_tokens_as_token_ids"],
        num_echoed_logprobs=_num_logprobs(values) if values["echo"] else 0,
        num_prompt_logprobs=0 if values["prompt_logprobs"] is None else values["prompt_logprobs"] + 1,
    )
