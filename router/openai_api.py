"""OpenAI's completions API: a JSON body in, a checked request out.

Everything is validated here, before the first byte of a response. Fields that would change the text
and are not implemented are refused, never ignored.
"""

import hashlib
import secrets
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from common.errors import RequestError
from common.wire.fields import MAX_INT32
from common.wire.sampling_params import SamplingParams
from router.json_fields import Fields, is_text, shown, wrong

TokenIds: TypeAlias = "array[int]"
Prompt: TypeAlias = "str | array[int]"

MAX_PROMPTS = 128
MAX_N = 128
MAX_STOPS = 4
MAX_STOP_CHARS = 256
MAX_USER_CHARS = 512
MAX_TOP_K = 1 << 30
DEFAULT_MAX_TOKENS = 16
MAX_MAX_TOKENS = 1 << 30
SEED_BITS = 63


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A valid request; `max_tokens` is still to be fitted to each prompt (`fit_max_tokens`)."""

    prompts: Sequence[Prompt]
    sampling: SamplingParams
    n: int
    stops: tuple[str, ...]
    stream: bool
    include_usage: bool
    client: str  # who asks, by the field `user`; "" when it does not say
    priority: int  # lower is earlier


def parse(body: Any, model_name: str, vocab_size: int, eos_token_ids: tuple[int, ...]) -> CompletionRequest:
    """Check every field; raises RequestError naming the first that is wrong."""
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object", code="invalid_json")
    fields = Fields(body)
    check_model(fields.string("model"), model_name)
    n = fields.integer("n", 1, 1, MAX_N)
    _refuse_unsupported(fields, n)
    stream = fields.boolean("stream")
    return CompletionRequest(
        prompts=_prompts(fields.value("prompt"), vocab_size),
        sampling=_sampling(fields, () if fields.boolean("ignore_eos") else eos_token_ids),
        n=n,
        stops=_stops(fields.value("stop")),
        stream=stream,
        include_usage=_include_usage(fields, stream),
        client=_client(fields),
        priority=fields.integer("priority", 0, -MAX_INT32, MAX_INT32),
    )


def fit_max_tokens(num_prompt_tokens: int, max_tokens: int, max_model_len: int) -> int:
    """`max_tokens`, or what is left of the context after the prompt; raises RequestError if nothing is."""
    if num_prompt_tokens == 0:
        raise RequestError("prompt is empty: it gives no tokens; send at least one", param="prompt")
    left = max_model_len - num_prompt_tokens
    if left < 1:
        raise too_long(f"{num_prompt_tokens} tokens", max_model_len)
    return min(max_tokens, left)


def too_long(length: str, max_model_len: int) -> RequestError:
    """The error for a prompt that leaves no room for an output; `length` is the prompt's, in words."""
    return RequestError(
        f"the prompt has {length}; prompt and output together may have {max_model_len} tokens: "
        f"shorten the prompt to at most {max_model_len - 1} tokens",
        param="prompt",
        code="context_length_exceeded",
    )


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


def _refuse_unsupported(fields: Fields, n: int) -> None:
    fields.only("best_of", (n,), "only best_of equal to n")
    fields.only("echo", (False,), "the response never repeats the prompt")
    fields.only("suffix", ("",), "the model does not fill in the middle")
    fields.only("logprobs", (), "leave it out")
    fields.only("logit_bias", ({},), "leave it out")
    fields.only("presence_penalty", (0, 0.0), "only 0")
    fields.only("frequency_penalty", (0, 0.0), "only 0")


def _client(fields: Fields) -> str:
    user = fields.string("user") or ""
    if len(user) > MAX_USER_CHARS:
        raise wrong("user", user, f"at most {MAX_USER_CHARS} characters")
    return user


def _sampling(fields: Fields, stop_token_ids: tuple[int, ...]) -> SamplingParams:
    seed = fields.integer("seed", secrets.randbits(SEED_BITS), -(1 << 63), (1 << 63) - 1)
    return SamplingParams(
        max_tokens=fields.integer("max_tokens", DEFAULT_MAX_TOKENS, 1, MAX_MAX_TOKENS),
        temperature=fields.number("temperature", 1.0, 0.0, 2.0),
        top_k=max(0, fields.integer("top_k", 0, -1, MAX_TOP_K)),
        top_p=fields.number("top_p", 1.0, 0.0, 1.0, above_low=True),
        min_p=fields.number("min_p", 0.0, 0.0, 1.0),
        seed=seed % (1 << SEED_BITS),
        stop_token_ids=stop_token_ids,
    )


def _stops(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > MAX_STOPS:
        raise wrong("stop", value, f"a string or a list of at most {MAX_STOPS} strings")
    for stop in stops:
        if not is_text(stop) or not 1 <= len(stop) <= MAX_STOP_CHARS:
            raise wrong("stop", stop, f"strings of 1 to {MAX_STOP_CHARS} characters")
    return tuple(stops)


def _include_usage(fields: Fields, stream: bool) -> bool:
    options = fields.value("stream_options")
    if options is None:
        return False
    if not stream:
        message = "stream_options only with stream = true; leave it out or stream"
        raise RequestError(message, param="stream_options")
    if not isinstance(options, dict):
        raise wrong("stream_options", options, 'an object such as {"include_usage": true}')
    return Fields(options).boolean("include_usage")


def _prompts(value: Any, vocab_size: int) -> list[Prompt]:
    """The four shapes of `prompt`: text, texts, token ids, lists of token ids."""
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list) or not value:
        raise wrong("prompt", value, "a string, a list of strings, a list of token ids or a list of such lists")
    if type(value[0]) is int:
        value = [value]
    if len(value) > MAX_PROMPTS:
        raise RequestError(f"{len(value)} prompts in one request: at most {MAX_PROMPTS}; split it", param="prompt")
    wanted = type(value[0])
    prompts: list[Prompt] = []
    for prompt in value:
        if type(prompt) is not wanted or not prompt:
            raise wrong("prompt", prompt, "prompts of one kind, none of them empty")
        if not isinstance(prompt, list) and not is_text(prompt):
            raise wrong("prompt", prompt, "strings of valid Unicode or token ids")
        prompts.append(_token_ids(prompt, vocab_size) if isinstance(prompt, list) else prompt)
    return prompts


def _token_ids(prompt: list[Any], vocab_size: int) -> TokenIds:
    if set(map(type, prompt)) != {int}:
        raise RequestError("prompt: a list of token ids holds integers only", param="prompt")
    low, high = min(prompt), max(prompt)
    if low < 0 or high >= vocab_size:
        outside = low if low < 0 else high
        raise wrong("prompt", outside, f"token ids from 0 to {vocab_size - 1}, the model's vocabulary")
    return array("i", prompt)
