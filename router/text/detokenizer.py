"""From token ids to text, as they come: never half a character, never part of a stop string (see `stop_strings`).

Invariant: the concatenation of everything `push` and `flush` return is the text of all ids decoded
at once, cut before the first stop string. It does not depend on how ids are grouped in time.
"""

from collections.abc import Callable, Sequence

from router.text.stop_strings import StopMatcher

Decode = Callable[[Sequence[int]], str]

REPLACEMENT = "\ufffd"
MAX_UNSETTLED_CHARS = 3
"""An unfinished UTF-8 character is at most three bytes, and each may show as one U+FFFD."""
MAX_PENDING_TOKENS = 32
"""More tokens than this without a settled character: try to forget some of them."""


class IncrementalDecoder:
    """Decodes a window of ids: `num_context` that only give context, then what is not settled.

    The context is there because a decoder may treat the first token of a text differently (drop its
    leading space); it is what was settled last, so the window stays a few tokens long.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._num_context = 0
        self._num_returned = 0  # characters of the window's text that are context or were returned

    def push(self, token_id: int) -> str:
        """The text that `token_id` settled; often empty inside a multi-byte character."""
        self._window.append(token_id)
        text = self._decode(self._window)
        num_settled = len(text) - _num_unsettled(text)
        chunk = text[self._num_returned : num_settled]
        if chunk:
            self._num_returned = num_settled
        if chunk and num_settled == len(text):
            self._slide()
        elif len(self._window) - self._num_context > MAX_PENDING_TOKENS:
            self._shorten(text)
        return chunk

    def flush(self) -> str:
        """What is left: an unfinished character shows as U+FFFD."""
        return self._decode(self._window)[self._num_returned :]

    def _slide(self) -> None:
        """Everything is settled: the newest tokens become the context of the next."""
        self._window = self._window[self._num_context :]
        self._num_context = len(self._window)
        self._num_returned = len(self._decode(self._window))

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
    """The text of one completion: ids in, text that may be shown out; `prefix` comes before everything else.

    Stop strings are looked for in what follows the first `min_tokens` tokens.
    """

    def __init__(
        self, decode: Decode, matcher: StopMatcher | None = None, prefix: str = "", min_tokens: int = 0
    ) -> None:
        self._decoder = IncrementalDecoder(decode)
        self._matcher = matcher
        self._prefix = prefix
        self._num_unmatched = min_tokens  # tokens to come in which no stop string is looked for

    @property
    def stop(self) -> str:
        """The stop string that is complete: push nothing more; empty while none is."""
        return "" if self._matcher is None else self._matcher.found

    def push(self, token_id: int) -> str:
        """The text to show after this token."""
        chunk = self._decoder.push(token_id)
        if self._num_unmatched:
            self._num_unmatched -= 1
        elif self._matcher is not None:
            chunk = self._matcher.feed(chunk)
        return self._after_prefix(chunk)

    def flush(self) -> str:
        """The rest, at the end of a completion that no stop string ended; it may complete one."""
        chunk = self._decoder.flush()
        if self._matcher is not None and not self._num_unmatched:
            chunk = self._matcher.feed(chunk)
            chunk += self._matcher.flush()
        return self._after_prefix(chunk)

    def _after_prefix(self, chunk: str) -> str:
        prefix, self._prefix = self._prefix, ""
        return prefix + chunk


def _num_unsettled(text: str) -> int:
    """Characters at the end that the next token may still change."""
    tail = text[-MAX_UNSETTLED_CHARS:]
    return len(tail) - len(tail.rstrip(REPLACEMENT))
