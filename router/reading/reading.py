"""Pure functions from a body's bytes to a checked and tokenized request, or to an answer, also packed.

Short bodies are read on the event loop or in threads, long bodies in another process (`reader`).
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from msgspec import structs

from common.base.errors import RequestError
from common.base.json_file import Json
from common.wire.values.packing import pack_ids
from common.wire.values.sampling_params import MAX_WORD_TOKENS
from router.base.helper_frames import CONVERSATIONS, Kind
from router.base.json_rules import shown
from router.base.shapes import PromptText, Tokens
from router.reading.id_lists import Parted, part
from router.reading.json_body import loads, values_of
from router.reading.packed_requests import packed_answer, packed_or_error, packed_request
from router.requests.completion_api import CompletionRequest, parse
from router.requests.responses_api import PARSERS
from router.requests.token_api import detokenize, tokenize
from router.text.model_info import ModelInfo
from router.text.prompts import DEFAULT_MAX_TOKENS
from router.text.tokenizer import Tokenizer

MAX_IDS_BYTES = 262_144
"""Limit for a body of ids on the event loop: 40,000 ids take a millisecond."""
MAX_REST_CHARS = 8192
"""Limit for text beside the ids in such a body."""
MAX_REPEATED_TOKENS = 262_144
MAX_PROMPT_SCORES = 131_072


ANSWERS: dict[Kind, Callable[[Json, Tokenizer, int], Tokens | PromptText]] = {
    Kind.TOKENIZE: tokenize,
    Kind.DETOKENIZE: detokenize,
}
"""Endpoints that need only the tokenizer."""


def parse_body(data: bytes | bytearray, info: ModelInfo) -> CompletionRequest:
    """Check everything but lengths; raise RequestError naming the wrong field. Empties a bytearray `data`."""
    return parse(values_of(data, _loads), info.name, info.vocab_size, info.eos_token_ids)


def parse_ids(data: bytes, info: ModelInfo) -> CompletionRequest | None:
    """Parse a body consisting mostly of ids, for the event loop; None if reading may take long."""
    parted = part(data.decode("ascii"), MAX_REST_CHARS) if data.isascii() else None
    values = None if parted is None else _parted_values(parted)
    return None if values is None else parse(values, info.name, info.vocab_size, info.eos_token_ids)


def parse_conversation(
    data: bytes | bytearray, tokenizer: Tokenizer, max_model_len: int, kind: Kind = Kind.CHAT
) -> CompletionRequest:
    """Check a conversation and write the prompt as text; otherwise like `parse_body`.

    Call in a separate process, because the model's template runs here.
    """
    return PARSERS[kind](values_of(data), tokenizer, max_model_len)


def answer(kind: Kind, data: bytes | bytearray, tokenizer: Tokenizer, max_model_len: int) -> bytes:
    """Return the JSON answer to a body of an `ANSWERS` kind; raise RequestError. Empties a bytearray `data`."""
    return json.dumps(ANSWERS[kind](values_of(data), tokenizer, max_model_len)).encode("ascii")


def tokenized(request: CompletionRequest, tokenizer: Tokenizer, max_model_len: int) -> CompletionRequest:
    """Return the request with prompts and bad words as tokens, and the texts of echoed prompts.

    Raises RequestError for anything too long.
    """
    if request.bad_words:
        sampling = structs.replace(request.sampling, bad_words=packed_words(request.bad_words, tokenizer))
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
    """Raise RequestError if repeating prompts in the response would hold up the event loop."""
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
    """Read a body of any kind, and return the reply packed by `packed_requests`."""

    def reply() -> bytes:
        if kind in ANSWERS:
            return packed_answer(answer(kind, data, tokenizer, max_model_len))
        if kind in CONVERSATIONS:
            parsed = parse_conversation(data, tokenizer, max_model_len, kind)
        else:
            parsed = parse_body(data, tokenizer.info)
        return packed_request(tokenized(parsed, tokenizer, max_model_len))

    return packed_or_error(reply, len(data))


def _loads(text: str) -> Json:
    """Parse the text of a completion's body, with arrays for long lists of ids in field `prompt`."""
    values = _parted_values(part(text))
    return loads(text) if values is None else values


def _parted_values(parted: Parted) -> Json:
    """Return the values, or None if the whole text has to be parsed.

    Reasons are: no long list, a list outside of `prompt`, or invalid JSON.
    """
    try:
        return parted.values(loads, "prompt") if parted.lists else None
    except (ValueError, RecursionError):
        return None  # errors must refer to the text as received


def packed_words(words: Sequence[str], tokenizer: Tokenizer) -> tuple[bytes, ...]:
    """Return the words for `SamplingParams.bad_words`; raise RequestError for a word of too many tokens.

    A word with a space before has other tokens than the word alone, so both are banned, as in vLLM. Unlike vLLM, both
    are banned whatever the number of tokens. Other tokenizations are allowed, because a model seldom uses any.
    """
    return tuple(dict.fromkeys(pack_ids(ids) for word in words for ids in _ways(word, tokenizer)))


def _ways(word: str, tokenizer: Tokenizer) -> Iterator[list[int]]:
    """Yield token ids of the word without and with a space before.

    The spaced form is left out if its tokens end with the plain tokens.
    """
    alone = word.lstrip(" ") or word
    plain, spaced = tokenizer.encode_inside([alone, f" {alone}"])
    for ids in (plain,) if spaced[-len(plain) :] == plain else (plain, spaced):
        if not 1 <= len(ids) <= MAX_WORD_TOKENS:
            message = f"bad_words has {shown(word)}, which is {len(ids)} tokens: at most {MAX_WORD_TOKENS}; ban a part"
            raise RequestError(message, param="bad_words")
        yield ids
