"""From the bytes of a body to a checked request whose prompts are tokens, or to an answer, and either as bytes.

Pure functions: they run on the event loop for what is short, in another process for what is not (`router.reader`).
"""

import json
from array import array
from collections.abc import Callable
from dataclasses import asdict, replace
from enum import IntEnum
from typing import Any, NoReturn

import msgpack

from common.errors import RequestError
from common.wire.sampling_params import SamplingParams
from router.bad_words import packed_words
from router.chat_api import parse_chat
from router.grammar_source import GrammarSource
from router.id_lists import Parted, part
from router.openai_api import CompletionRequest, ResponseOptions, TextOptions, parse
from router.prompts import DEFAULT_MAX_TOKENS, Encoding, TokenIds
from router.shapes import PromptText, Tokens
from router.token_api import detokenize, tokenize
from router.tokenizer import ModelInfo, Tokenizer

PARTS: dict[str, type[Any]] = {
    "encoding": Encoding, "sampling": SamplingParams, "text": TextOptions, "response": ResponseOptions,
    "grammar": GrammarSource,
}  # fmt: skip
"""Fields of a request that have fields of their own."""
MAX_IDS_BYTES = 262_144
"""Of a body that is read on the event loop: 40,000 ids, which take a millisecond."""
MAX_REST_CHARS = 8192
"""Of the same beside the ids."""
MAX_REPEATED_TOKENS = 262_144
MAX_PROMPT_SCORES = 131_072


class Kind(IntEnum):
    """What a body asks for."""

    COMPLETION = 0
    TOKENIZE = 1
    DETOKENIZE = 2
    CHAT = 3


ANSWERS: dict[Kind, Callable[[Any, Tokenizer, int], Tokens | PromptText]] = {
    Kind.TOKENIZE: tokenize,
    Kind.DETOKENIZE: detokenize,
}
"""What needs nothing but the tokenizer."""


def values_of(data: bytes | bytearray, ids_field: str = "") -> Any:
    """What the JSON says; raises RequestError for what is none. Empties a `data` that can be emptied.

    In field `ids_field` of an object long lists of token ids are arrays, see `id_lists`.
    """
    try:
        text = data.decode(json.detect_encoding(data), "surrogatepass")
        if isinstance(data, bytearray):
            data.clear()
        values = _parted_values(part(text), ids_field) if ids_field else None
        return _loads(text) if values is None else values
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not valid JSON: {error!s:.100}", code="invalid_json") from None


def parse_body(data: bytes | bytearray, info: ModelInfo) -> CompletionRequest:
    """Check everything but lengths; raises RequestError naming what is wrong. Empties a `data` that can be emptied."""
    return parse(values_of(data, "prompt"), info.name, info.vocab_size, info.eos_token_ids)


def parse_ids(data: bytes, info: ModelInfo) -> CompletionRequest | None:
    """`parse_body` for the event loop, of a body that is all but ids; None for one that may be long to read."""
    parted = part(data.decode("ascii"), MAX_REST_CHARS) if data.isascii() else None
    values = None if parted is None else _parted_values(parted, "prompt")
    return None if values is None else parse(values, info.name, info.vocab_size, info.eos_token_ids)


def parse_chat_body(data: bytes | bytearray, tokenizer: Tokenizer, max_model_len: int) -> CompletionRequest:
    """The same for a chat, whose prompt is a text then; in a process of its own, as it runs the model's template."""
    return parse_chat(values_of(data), tokenizer, max_model_len)


def answer(kind: Kind, data: bytes | bytearray, tokenizer: Tokenizer, max_model_len: int) -> bytes:
    """The JSON that answers a body of one of `ANSWERS`; raises RequestError. Empties a `data` that can be emptied."""
    return json.dumps(ANSWERS[kind](values_of(data), tokenizer, max_model_len)).encode("ascii")


def tokenized(request: CompletionRequest, tokenizer: Tokenizer, max_model_len: int) -> CompletionRequest:
    """The request with prompts and bad words as tokens, and prompts as text if it repeats them.

    Raises RequestError for what is too long.
    """
    if request.bad_words:
        sampling = replace(request.sampling, bad_words=packed_words(request.bad_words, tokenizer))
        request = replace(request, sampling=sampling, bad_words=())
    asked = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    encoding = request.encoding.limit(max_model_len, max(1, asked))
    prompts = tokenizer.encode(request.prompts, max_model_len, encoding)
    _check_repeated(request, request.n * sum(map(len, prompts)))
    if not request.text.echo:
        return replace(request, prompts=prompts)
    is_cut = encoding.max_tokens is not None
    texts = (prompt if isinstance(prompt, str) and not is_cut else None for prompt in request.prompts)
    echoes = (tokenizer.decode_prompt(ids) if text is None else text for text, ids in zip(texts, prompts, strict=True))
    return replace(request, prompts=prompts, echoes=tuple(echoes))


def _check_repeated(request: CompletionRequest, num_tokens: int) -> None:
    """Raise RequestError when so much of prompts is to be sent back that writing it would hold up the event loop."""
    names = [
        name for name, asked in (("echo", request.text.echo), ("return_token_ids", request.response.token_ids)) if asked
    ]
    if names and num_tokens > MAX_REPEATED_TOKENS:
        message = (
            f"{names[0]} repeats {num_tokens} prompt tokens, n times each: at most {MAX_REPEATED_TOKENS}; split it"
        )
        raise RequestError(message, param=names[0])
    num_scores = num_tokens * request.response.num_scores
    if num_scores > MAX_PROMPT_SCORES:
        name = "prompt_logprobs" if request.response.num_prompt_logprobs else "logprobs"
        message = (
            f"{name} asks for {num_scores} log-probabilities of {num_tokens} prompt tokens, n times each: at most "
            f"{MAX_PROMPT_SCORES}; split the request, or ask for fewer of each"
        )
        raise RequestError(message, param=name)


def read(data: bytearray, tokenizer: Tokenizer, max_model_len: int, kind: Kind = Kind.COMPLETION) -> bytes:
    """`parse_body` and `tokenized`, or `answer`, packed for `unpack` and `unpack_answer`; so is a RequestError."""
    num_bytes = len(data)
    try:
        if kind in ANSWERS:
            reply: dict[str, Any] = {"answer": answer(kind, data, tokenizer, max_model_len)}
        else:
            is_chat = kind is Kind.CHAT
            parsed = parse_chat_body(data, tokenizer, max_model_len) if is_chat else parse_body(data, tokenizer.info)
            request = tokenized(parsed, tokenizer, max_model_len)
            prompts = [prompt.tobytes() for prompt in request.prompts if not isinstance(prompt, str)]
            reply = asdict(replace(request, prompts=())) | {"prompts": prompts}
    except RequestError as error:
        reply = vars(error)
    except MemoryError:
        message = f"a body of {num_bytes} bytes holds too many values to be read; split the request"
        reply = vars(RequestError(message, code="request_too_large", status=413))
    packed: bytes = msgpack.packb(reply)
    return packed


def unpack(reply: bytes) -> CompletionRequest:
    """The completion that `read` found; raises its RequestError."""
    values = _reply_values(reply)
    parts = {name: part(**values.pop(name)) for name, part in PARTS.items()}
    return CompletionRequest(prompts=list(map(_token_ids, values.pop("prompts"))), **parts, **values)


def unpack_answer(reply: bytes) -> bytes:
    """The answer that `read` found; raises its RequestError."""
    found: bytes = _reply_values(reply)["answer"]
    return found


def _reply_values(reply: bytes) -> dict[str, Any]:
    values: dict[str, Any] = msgpack.unpackb(reply, use_list=False)
    if "message" in values:
        raise RequestError(values.pop("message"), **values)
    return values


def _parted_values(parted: Parted, ids_field: str) -> Any:
    """None where the whole text has to be read: it has no long list there, or one elsewhere, or is not valid JSON."""
    try:
        return parted.values(_loads, ids_field) if parted.lists else None
    except (ValueError, RecursionError):
        return None  # what is wrong is said of the text as it came


def _loads(text: str, **options: Any) -> Any:
    return json.loads(text, parse_constant=_refuse_constant, **options)


def _token_ids(data: bytes) -> TokenIds:
    ids = array("i")
    ids.frombytes(data)
    return ids


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
