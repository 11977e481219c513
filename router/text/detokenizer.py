"""Incremental detokenizer: never emits half a character or part of a stop string (see `stop_strings`).

Invariant: the concatenated results of `push` and `flush` equal the text of all ids decoded at once, cut before the
first stop string. The result does not depend on the grouping of ids in time.

Decoders with byte fallback decode adjoining byte tokens as a whole. While the last character is unfinished, they show
each byte as U+FFFD, also those of finished characters. Characters once returned stay, whatever bytes follow.
"""

import json
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from router.text.stop_strings import StopMatcher

if TYPE_CHECKING:
    import tokenizers

Decode = Callable[[Sequence[int]], str]
Piece = Callable[[int], str | None]
"""Returns the text that a token adds to a text of whole characters; None if neighbours matter."""

REPLACEMENT = "\ufffd"
BYTE = re.compile("<0x([0-9A-F]{2})>")
"""A single byte, as written in vocabularies of characters."""
MAX_UNFINISHED_BYTES = 3
"""Most bytes of an unfinished UTF-8 character, each perhaps shown as U+FFFD."""
MAX_PENDING_TOKENS = 32
"""Tokens before U+FFFD is taken for invalid bytes, and before the decoder tries to drop some tokens."""
MAX_REMEMBERED = 1 << 14
CONTEXT = "a"
BYTE_LEVEL = "ByteLevel"
JOINING = [
    {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
]
"""Steps of decoders like Gemma's: tokens change one by one, and bytes beside bytes become characters."""
FIRST_SPACE = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
"""Step of decoders like Mistral's, which concerns the beginning of a text."""


def no_piece(token_id: int) -> None:
    """Return None, because neighbours may matter to any token of an unknown decoder."""


def pieces_of(tokenizer: "tokenizers.Tokenizer", decode: Decode) -> Piece:
    """Return the pieces of `decode`, which decodes as `tokenizer` does, perhaps without some tokens.

    Bytes are no pieces, because a character may need several.
    """
    context = tokenizer.token_to_id(CONTEXT)
    if context is None or not _only_joins(tokenizer):
        return no_piece

    @lru_cache(MAX_REMEMBERED)
    def piece(token_id: int) -> str | None:
        text = decode([context, token_id]).removeprefix(CONTEXT)
        is_byte = BYTE.fullmatch(tokenizer.id_to_token(token_id) or "")
        return None if is_byte or REPLACEMENT in text else text

    return piece


def _only_joins(tokenizer: "tokenizers.Tokenizer") -> bool:
    """Tell whether a text is the joined texts of its tokens, apart from its beginning and from bytes."""
    if tokenizer.decoder is None:
        return False
    decoder = json.loads(tokenizer.decoder.__getstate__())
    if decoder["type"] == BYTE_LEVEL:
        return True
    return decoder["type"] == "Sequence" and decoder["decoders"] in (JOINING, [*JOINING, FIRST_SPACE])


class IncrementalDecoder:
    """Decoder of a window of ids: `num_context` ids for context, then unsettled ids.

    Context is needed because a decoder may treat the first token of a text differently, and drop its leading space.
    Context is the text settled last, so the window stays a few tokens long. While all text is settled, a token with a
    piece is not decoded, and becomes the context.
    """

    def __init__(self, decode: Decode, piece: Piece = no_piece) -> None:
        self._decode, self._piece = decode, piece
        self._window: list[int] = []
        self._num_context = 0
        self._num_returned = 0  # characters of the window's text, context or already returned
        self._is_settled = False  # the window is all context, and `num_returned` is not known

    def push(self, token_id: int) -> str:
        """Return text settled by `token_id`, often empty inside a multi-byte character."""
        if self._is_settled:
            if (piece := self._piece(token_id)) is not None:
                if piece:
                    self._window = [token_id]
                return piece
            self._is_settled, self._num_context = False, len(self._window)
            self._num_returned = len(self._decode(self._window))
        return self._push_to_window(token_id)

    def _push_to_window(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        is_stuck = len(self._window) - self._num_context > MAX_PENDING_TOKENS
        num_settled = len(text) - _num_unsettled(text, MAX_UNFINISHED_BYTES if is_stuck else len(text))
        chunk = text[self._num_returned : num_settled]
        if chunk:
            self._num_returned = num_settled
        if chunk and num_settled == len(text):
            self._slide()
        elif is_stuck:
            self._shorten(text)
        return chunk

    def flush(self) -> str:
        """Return the rest; an unfinished character becomes U+FFFD."""
        return "" if self._is_settled else self._decode(self._window)[self._num_returned :]

    def _slide(self) -> None:
        """Make the newest tokens the context of the next, because all text is settled."""
        self._window = self._window[self._num_context :]
        self._is_settled = True

    def _shorten(self, text: str) -> None:
        """Keep the window short through endless invisible tokens or invalid bytes."""
        if text == self._decode(self._window[: self._num_context]):
            del self._window[self._num_context :]
            return
        for num_head in range(len(self._window) - 1, len(self._window) - 8, -1):
            head = self._decode(self._window[:num_head])
            if len(head) <= self._num_returned and head + self._decode(self._window[num_head:]) == text:
                del self._window[:num_head]
                self._num_context = 0
                self._num_returned -= len(head)
                return


class TextStream:
    """Text of a completion: ids in, displayable text out, after `prefix`.

    Stop strings are searched in the text after the first `min_tokens` tokens.
    """

    def __init__(
        self,
        decode: Decode,
        matcher: StopMatcher | None = None,
        prefix: str = "",
        min_tokens: int = 0,
        piece: Piece = no_piece,
    ) -> None:
        self._decoder = IncrementalDecoder(decode, piece)
        self._matcher = matcher
        self._prefix = prefix
        self._num_unmatched = min_tokens  # coming tokens exempt from stop strings

    @property
    def stop(self) -> str:
        """The complete stop string, "" before any. Push nothing after a stop string."""
        return "" if self._matcher is None else self._matcher.found

    def push(self, token_id: int) -> str:
        """Return the text to show after this token."""
        chunk = self._decoder.push(token_id)
        if self._num_unmatched:
            self._num_unmatched -= 1
        elif self._matcher is not None:
            chunk = self._matcher.feed(chunk)
        return self._after_prefix(chunk) if self._prefix else chunk

    def flush(self) -> str:
        """Return the rest of a completion not ended by a stop string; the rest may complete a stop string."""
        chunk = self._decoder.flush()
        if self._matcher is not None and not self._num_unmatched:
            chunk = self._matcher.feed(chunk)
            chunk += self._matcher.flush()
        return self._after_prefix(chunk)

    def _after_prefix(self, chunk: str) -> str:
        prefix, self._prefix = self._prefix, ""
        return prefix + chunk


def _num_unsettled(text: str, max_chars: int) -> int:
    """Count characters at the end of `text` that the next token may change, at most `max_chars`."""
    return min(len(text) - len(text.rstrip(REPLACEMENT)), max_chars)
