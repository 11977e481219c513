"""OpenAI's completions API: a JSON body in, a checked request out.

Everything is validated here, before the first byte of a response. Which fields there are, and what each may be, says
`completion_fields`; what follows from several of them together is checked here.
"""

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from common.base.errors import RequestError
from common.wire.values.packing import pack_ids
from common.wire.values.sampling_params import SamplingParams
from router.base.json_rules import shown, wrong
from router.base.shapes import ResponseWarning
from router.grammar.source import NO_GRAMMAR, Found, GrammarSource
from router.requests.completion_fields import COMPLETION_FIELDS
from router.requests.structured_fields import grammar_source
from router.text.chat_answer import Thoughts
from router.text.prompts import DEFAULT_MAX_TOKENS, Encoding, Prompt, check_vocabulary

SEED_BITS = 63


@dataclass(frozen=True, slots=True)
class TextOptions:
    """How tokens become the text of a choice, and what ends it."""

    stops: tuple[str, ...]
    stop_token_ids: tuple[int, ...]  # what the client named itself, end-of-text tokens left out
    include_stop: bool
    skip_special_tokens: bool
    echo: bool  # the prompt stands before it


@dataclass(frozen=True, slots=True)
class ResponseOptions:
    """The shape of the response."""

    stream: bool
    include_usage: bool  # in a stream's last chunk
    continuous_usage: bool  # in each chunk
    token_ids: bool  # of prompt and text, in each choice
    tokens_as_ids: bool  # wherever tokens are named
    num_echoed_logprobs: int = 0  # of each prompt token in `logprobs`, its own and those of the likeliest
    num_prompt_logprobs: int = 0  # of each prompt token in `prompt_logprobs`, the same
    thoughts: Thoughts = ""  # of a chat, as the next three
    tells_thoughts: bool = True
    tool_format: str = ""  # see `tool_calls`
    forced: tuple[str, ...] = ()  # names of the tools of which one has to be called
    warnings: Sequence[ResponseWarning] = ()
    repeated: str = "{}"  # of /v1/responses: a JSON object, what a response tells of its request
    has_summary: bool = False  # of the same: thoughts come as a summary

    @property
    def num_scores(self) -> int:
        """Log-probabilities of each prompt token that are to be computed."""
        return max(self.num_echoed_logprobs, self.num_prompt_logprobs)


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A valid request; `max_tokens` is still to be fitted to each prompt (`prompts.fit_max_tokens`).

    `max_tokens` and `seed` of `sampling` become those of each choice (see `job`).
    """

    prompts: Sequence[Prompt]
    encoding: Encoding
    sampling: SamplingParams
    max_tokens: int | None  # None: what is usual, or what is left of the context
    n: int
    text: TextOptions
    response: ResponseOptions
    client: str  # who asks, by the field `user`; "" when it does not say
    priority: int  # lower is earlier
    usual_max_tokens: int = DEFAULT_MAX_TOKENS
    bad_words: tuple[str, ...] = ()  # once prompts are tokens, they are of `sampling`
    grammar: GrammarSource = NO_GRAMMAR  # of the text; compiled it becomes part of `sampling`
    echoes: tuple[str, ...] = ()  # of each prompt, once it is tokens: the text to repeat
    cache_salt: str = ""
    owner: str = ""  # of the API key, where keys are asked for

    @property
    def salt(self) -> bytes:
        """KV is shared among requests of the same one alone: of one API key and one `cache_salt`."""
        named = f"{self.owner}/{self.cache_salt}"  # no salt has a slash
        return hashlib.sha256(named.encode()).digest() if self.owner or self.cache_salt else b""


def parse(body: Any, model_name: str, vocab_size: int, eos_token_ids: tuple[int, ...]) -> CompletionRequest:
    """Check every field; raises RequestError naming the first that is wrong."""
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
    values: dict[str, Any],
    prompts: Sequence[Prompt],
    max_tokens: int | None,
    vocab_size: int,
    eos_token_ids: tuple[int, ...],
) -> CompletionRequest:
    """The request that values of all fields of completions make, together with what is no field of every API."""
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


def held_to(request: CompletionRequest, found: Found) -> CompletionRequest:
    """The request with its grammar compiled, and with a warning of each keyword that texts are not held to."""
    field = request.grammar.field
    warnings = [ResponseWarning(code="keyword_dropped", message=each, param=field) for each in found.dropped]
    return replace(
        request,
        sampling=replace(request.sampling, grammar=found.grammar),
        response=replace(request.response, warnings=warnings),
    )


def json_object(body: Any) -> dict[str, Any]:
    """The body, if it is an object; raises RequestError for anything else."""
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object", code="invalid_json")
    return body


def choice_seed(seed: int, choice: int) -> int:
    """The seed of the `choice`-th of n texts for one prompt: the first has the request's own."""
    if choice == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}:{choice}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - SEED_BITS)


def check_model(model: str | None, model_name: str) -> None:
    """Raise RequestError (404) for a model that is not the one served; None means any."""
    if model is not None and model != model_name:
        raise RequestError(
            f"model {shown(model)} does not exist here; this server has {model_name!r}",
            param="model",
            code="model_not_found",
            status=404,
        )


def _encoding(values: dict[str, Any]) -> Encoding:
    return Encoding(
        add_special_tokens=values["add_special_tokens"],
        max_tokens=values["truncate_prompt_tokens"],
        keep_end=values["truncation_side"] == "left",
        salt=values["cache_salt"] or "",
    )


def _text_options(values: dict[str, Any], eos_token_ids: tuple[int, ...]) -> TextOptions:
    return TextOptions(
        stops=values["stop"],
        stop_token_ids=tuple(token_id for token_id in values["stop_token_ids"] if token_id not in eos_token_ids),
        include_stop=values["include_stop_str_in_output"],
        skip_special_tokens=values["skip_special_tokens"],
        echo=values["echo"],
    )


def _sampling(values: dict[str, Any], eos_token_ids: tuple[int, ...]) -> SamplingParams:
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


def _stop_ids(values: dict[str, Any], eos_token_ids: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(dict.fromkeys((*eos_token_ids, *values["stop_token_ids"])))


def _min_tokens(values: dict[str, Any]) -> int:
    num_tokens, most = values["min_tokens"], values["max_tokens"]
    if num_tokens > most:
        raise wrong("min_tokens", num_tokens, f"at most max_tokens, {most}")
    return int(num_tokens)


def _num_logprobs(values: dict[str, Any]) -> int:
    """Those of the likeliest tokens and that of the chosen one."""
    return 0 if values["logprobs"] is None else int(values["logprobs"]) + 1


def _allowed_ids(values: dict[str, Any], eos_token_ids: tuple[int, ...]) -> bytes:
    """The allowed tokens as the wire has them, none if all are."""
    allowed = values["allowed_token_ids"]
    if allowed is None:
        return b""
    if values["min_tokens"] and set(allowed) <= set(_stop_ids(values, eos_token_ids)):
        raise wrong("allowed_token_ids", allowed, "with min_tokens, at least one token that does not end the text")
    return pack_ids(sorted(set(allowed)))


def _response_options(values: dict[str, Any]) -> ResponseOptions:
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
