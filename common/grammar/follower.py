"""The way of one text through its grammar."""

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from common.grammar.reasons import reason
from common.wire.sampling_params import SamplingParams

if TYPE_CHECKING:
    import llguidance

    from common.grammar.grammars import Grammars


class Outcome(NamedTuple):
    """Where a text is in its grammar: a mask, an end, or a problem."""

    mask: np.ndarray | None = None  # [cdiv(vocab, 32)] int32: a bit for each token that may follow
    is_over: bool = False  # nothing may follow
    problem: str = ""


class Follower:
    """Knows after each token which may follow; one thread at a time.

    Args:
        stop_token_ids: of the model's end tokens these follow where a text may end, the others where nothing else can.
    """

    def __init__(self, grammar: str, stop_token_ids: Collection[int] = ()) -> None:
        self.grammar = grammar
        self.stop_token_ids = stop_token_ids
        self._matcher: llguidance.LLMatcher | None = None

    @staticmethod
    def of(sampling: SamplingParams) -> "Follower":
        """For a request that has a grammar."""
        return Follower(sampling.grammar, sampling.stop_token_ids)

    def follow(self, grammars: "Grammars", token_ids: Sequence[int]) -> Outcome:
        """Go on by these tokens, none of them at the beginning of a text."""
        if self._matcher is None:
            self._matcher = grammars.matcher(self.grammar)
        matcher = self._matcher
        if token_ids and not matcher.is_error() and not matcher.consume_tokens(list(token_ids)):
            return Outcome(problem=reason(matcher) or "the text is none of the grammar")
        if matcher.is_error():
            return Outcome(problem=reason(matcher))
        if matcher.is_stopped():
            return Outcome(is_over=True)
        mask = np.zeros(-(-grammars.vocab // 32), np.int32)
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if matcher.is_error():
            return Outcome(problem=reason(matcher))
        if (named := _only(mask)) is not None and not matcher.validate_tokens([named]):
            mask = _mask_of(grammars.first_token(matcher.compute_ff_bytes()), mask.size)
        if ignored := [token_id for token_id in grammars.end_ids if token_id not in self.stop_token_ids]:
            mask = _without(mask, ignored)
        return Outcome(mask) if mask.any() else Outcome(problem="no token can follow")


def _only(mask: np.ndarray) -> int | None:
    """The token that the mask has, if it has one only.

    Where a grammar forces a text that is that of an added token, llguidance has that token in its mask, and does not
    take it: to it such a token is no text. Others spell the text.
    """
    (words,) = mask.nonzero()
    bits = int(mask.view(np.uint32)[words[0]]) if words.size == 1 else 0
    return int(words[0]) * 32 + bits.bit_length() - 1 if bits.bit_count() == 1 else None


def _mask_of(token_id: int, num_words: int) -> np.ndarray:
    mask = np.zeros(num_words, np.uint32)
    mask[token_id // 32] = 1 << token_id % 32
    return mask.view(np.int32)


def _without(mask: np.ndarray, token_ids: Sequence[int]) -> np.ndarray:
    """The mask without these tokens, unless it has no others."""
    others = mask.copy()
    for token_id in token_ids:
        others.view(np.uint32)[token_id // 32] &= ~np.uint32(1 << token_id % 32)
    return others if others.any() else mask
