"""The field `logprobs` of a choice, in OpenAI's shape: how likely its tokens were, and which others there were."""

import math
import re
from collections.abc import Sequence
from typing import Protocol

from common.wire.output_token import OutputToken
from router.detokenizer import REPLACEMENT, Decode, IncrementalDecoder
from router.shapes import LogprobsBody

LEAST = -9999.0
"""In place of -inf, which JSON does not have."""
SPACE = "\u2581"  # how some vocabularies write it
BYTE = re.compile("<0x([0-9A-F]{2})>")  # how those write a byte that is no character


class Vocabulary(Protocol):
    """What a tokenizer tells of single tokens."""

    def strings(self, ids: Sequence[int]) -> list[str | None]: ...
    def decode_all(self, ids: Sequence[int]) -> str: ...


class TokenStrings:
    """What each token is called: its text; its bytes where these are not whole characters; its id if it has neither."""

    def __init__(self, vocabulary: Vocabulary, *, as_ids: bool = False) -> None:
        self._vocabulary = vocabulary
        self._as_ids = as_ids
        self._known: dict[int, str] = {}

    def of(self, token_id: int) -> str:
        if token_id not in self._known:
            self._known[token_id] = self._made(token_id)
        return self._known[token_id]

    def _made(self, token_id: int) -> str:
        [written] = self._vocabulary.strings([token_id])
        if written is None or self._as_ids:
            return f"token_id:{token_id}"
        text = self._vocabulary.decode_all([token_id])
        if REPLACEMENT in text:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in _bytes_of(written))
        return f" {text}" if written.startswith(SPACE) and not text.startswith(" ") else text


class LogprobLog:
    """What is told of each token of one completion."""

    def __init__(self, strings: TokenStrings, decode: Decode) -> None:
        self._strings = strings
        self._decoder = IncrementalDecoder(decode)
        self._num_chars = 0
        self._tokens: list[str] = []
        self._values: list[float] = []
        self._tops: list[dict[str, float]] = []
        self._offsets: list[int] = []

    def push(self, token: OutputToken) -> None:
        """Log the next token; it has log-probabilities."""
        assert token.logprobs is not None, "the dispatcher takes no other"
        values = [value if value > -math.inf else LEAST for value in token.logprobs.values]
        top: dict[str, float] = {}
        for token_id, value in zip(token.logprobs.token_ids, values, strict=True):
            top.setdefault(self._strings.of(token_id), value)
        self._tokens.append(self._strings.of(token.token_id))
        self._values.append(values[0])
        self._tops.append(top)
        self._offsets.append(self._num_chars)
        self._num_chars += len(self._decoder.push(token.token_id))

    def part(self, begin: int, end: int) -> LogprobsBody:
        """Of the outputs from `begin` to `end`; an offset is where in the text what the token adds begins."""
        return {
            "tokens": self._tokens[begin:end],
            "token_logprobs": self._values[begin:end],
            "top_logprobs": self._tops[begin:end],
            "text_offset": self._offsets[begin:end],
        }


def _bytes_of(written: str) -> bytes:
    """What a vocabulary means by a token: bytes of its own notation, or characters that stand for one byte each."""
    if match := BYTE.fullmatch(written):
        return bytes.fromhex(match[1])
    return b"".join(bytes([_BYTES[char]]) if char in _BYTES else char.encode() for char in written)


def _byte_characters() -> dict[str, int]:
    """GPT-2's: a byte that prints is itself, the others are the characters from 256 on."""
    printing = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printing]
    return {chr(byte): byte for byte in printing} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_characters()
