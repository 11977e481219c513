"""Log-probabilities of output tokens and their alternatives, in OpenAI's format (field `logprobs`)."""

import math
from collections.abc import Iterable, Sequence
from typing import Protocol

from common.wire.values.output_token import Logprobs, OutputToken
from router.base.shapes import ChatLogprobs, ChatToken, LikelyToken, LogprobsBody
from router.text.detokenizer import BYTE, REPLACEMENT, Decode, IncrementalDecoder, Piece, no_piece

LEAST = -9999.0
"""Replaces -inf, which JSON lacks."""
SPACE = "\u2581"  # in some vocabularies


class Vocabulary(Protocol):
    """Access to the text of single tokens, implemented by a tokenizer."""

    def strings(self, ids: Sequence[int]) -> list[str | None]: ...
    def decode_all(self, ids: Sequence[int]) -> str: ...


class TokenStrings:
    """Names of tokens: the text, or the bytes of partial characters, or the id of a token with neither."""

    def __init__(self, vocabulary: Vocabulary, *, as_ids: bool = False) -> None:
        self._vocabulary = vocabulary
        self._as_ids = as_ids
        self._known: dict[int, str] = {}
        self._bytes: dict[int, list[int] | None] = {}

    def of(self, token_id: int) -> str:
        if token_id not in self._known:
            self._known[token_id] = self._made(token_id)
        return self._known[token_id]

    def bytes_of(self, token_id: int) -> list[int] | None:
        """Return the bytes added to a text by a token, None for a token without text."""
        if token_id not in self._bytes:
            self._bytes[token_id] = self._made_bytes(token_id)
        return self._bytes[token_id]

    def _made_bytes(self, token_id: int) -> list[int] | None:
        [written] = self._vocabulary.strings([token_id])
        if written is None:
            return None
        text = self._vocabulary.decode_all([token_id])
        return list(_bytes_of(written) if REPLACEMENT in text else _with_space(text, written).encode())

    def named(self, token_ids: Sequence[int], values: Sequence[float]) -> dict[str, float]:
        """Return values by token name; of several tokens with equal names, the first counts."""
        top: dict[str, float] = {}
        for token_id, value in zip(token_ids, values, strict=True):
            top.setdefault(self.of(token_id), value)
        return top

    def _made(self, token_id: int) -> str:
        [written] = self._vocabulary.strings([token_id])
        if written is None or self._as_ids:
            return f"token_id:{token_id}"
        text = self._vocabulary.decode_all([token_id])
        if REPLACEMENT in text:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in _bytes_of(written))
        return _with_space(text, written)


class LogprobLog:
    """Log-probabilities of the tokens of a completion."""

    def __init__(self, strings: TokenStrings, decode: Decode, num_chars: int = 0, piece: Piece = no_piece) -> None:
        """Begin a log; `num_chars` characters of the text come before the first token."""
        self._strings = strings
        self._decoder = IncrementalDecoder(decode, piece)
        self._num_chars = num_chars
        self._tokens: list[str] = []
        self._values: list[float | None] = []
        self._tops: list[dict[str, float] | None] = []
        self._offsets: list[int] = []
        self._told: list[Logprobs] = []

    def push(self, token: OutputToken) -> None:
        """Log the next token, which has log-probabilities."""
        assert token.logprobs is not None, "the dispatcher takes no other"
        values = finite(token.logprobs.values)
        self._told.append(token.logprobs)
        self._tokens.append(self._strings.of(token.token_id))
        self._values.append(values[0])
        self._tops.append(self._strings.named(token.logprobs.token_ids, values))
        self._offsets.append(self._num_chars)
        self._num_chars += len(self._decoder.push(token.token_id))

    def part(self, begin: int, end: int) -> LogprobsBody:
        """Return the field for outputs `begin` to `end`; offsets are positions of tokens in the text."""
        return {
            "tokens": self._tokens[begin:end],
            "token_logprobs": self._values[begin:end],
            "top_logprobs": self._tops[begin:end],
            "text_offset": self._offsets[begin:end],
        }

    def chat_part(self, begin: int, end: int) -> ChatLogprobs:
        """Return the chat format of `part`."""
        return {"content": [self._chat_token(told) for told in self._told[begin:end]], "refusal": None}

    def _chat_token(self, told: Logprobs) -> ChatToken:
        chosen, *likeliest = map(self._likely, told.token_ids, told.values)
        return {**chosen, "top_logprobs": likeliest}

    def _likely(self, token_id: int, value: float) -> LikelyToken:
        return {
            "token": self._strings.of(token_id),
            "logprob": max(value, LEAST),
            "bytes": self._strings.bytes_of(token_id),
        }


def _with_space(text: str, written: str) -> str:
    """Return a token's text with the leading space that a decoder drops at the beginning of a text."""
    return f" {text}" if written.startswith(SPACE) and not text.startswith(" ") else text


def finite(values: Iterable[float]) -> list[float]:
    """Replace -inf by `LEAST`, because JSON has no infinity."""
    return [value if value > -math.inf else LEAST for value in values]


def _bytes_of(written: str) -> bytes:
    """Return the bytes of a vocabulary entry, written in its byte notation or as characters for a byte each."""
    if match := BYTE.fullmatch(written):
        return bytes.fromhex(match[1])
    return b"".join(bytes([_BYTES[char]]) if char in _BYTES else char.encode() for char in written)


def _byte_characters() -> dict[str, int]:
    """Return GPT-2's table of characters for bytes: printing bytes stand for themselves, others begin at 256."""
    printing = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printing]
    return {chr(byte): byte for byte in printing} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_characters()
