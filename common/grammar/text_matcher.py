"""The position of a text in a grammar."""

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from common.grammar.reasons import reason
from common.grammar.records import Kind, Masks

if TYPE_CHECKING:
    import llguidance

    from common.grammar.grammars import Grammars


class TextMatcher:
    """A text under a grammar; computes the mask of allowed tokens after each token.

    Args:
        matcher: at the beginning of a text; not shared with other texts.
        stop_token_ids: end tokens allowed where a text may end; other end tokens only where nothing else is allowed.
    """

    def __init__(
        self, grammars: "Grammars", matcher: "llguidance.LLMatcher", stop_token_ids: Collection[int] = ()
    ) -> None:
        self._grammars, self._matcher = grammars, matcher
        self._ignored = [token_id for token_id in grammars.end_ids if token_id not in stop_token_ids]

    def follow(self, token_ids: Sequence[int], masks: Masks, place: int) -> tuple[Kind, str]:
        """Follow the tokens (none at the beginning of a text) and write the mask to `place`.

        Returns MASK, OVER, or PROBLEM with the reason.
        """
        matcher = self._matcher
        if token_ids and not matcher.is_error() and not matcher.consume_tokens(token_ids):
            return Kind.PROBLEM, reason(matcher) or "the text is none of the grammar"
        if matcher.is_error():
            return Kind.PROBLEM, reason(matcher)
        if matcher.is_stopped():
            return Kind.OVER, ""
        matcher.unsafe_compute_mask_ptr(masks.address(place), masks.mask_bytes)
        if matcher.is_error():
            return Kind.PROBLEM, reason(matcher)
        mask = masks.read(place)
        num_set = len(mask) - mask.count(0)  # bytes with a token
        if not num_set:
            return Kind.PROBLEM, "no token can follow"
        if num_set == 1 and (named := _only(mask)) is not None and not matcher.validate_tokens([named]):
            mask = _mask_of(self._grammars.first_token(matcher.compute_ff_bytes()), masks.mask_bytes)
            masks.write(place, mask)
        if any(mask[token_id // 8] >> token_id % 8 & 1 for token_id in self._ignored):
            masks.write(place, _without(mask, self._ignored))
        return Kind.MASK, ""


def _only(mask: bytes) -> int | None:
    """Return the only token of a mask with a single non-empty byte; None with several tokens.

    If a grammar forces a text equal to an added token, llguidance's mask holds only the added token. Yet llguidance
    refuses the token, because an added token is no text there. Ordinary tokens can spell the text instead.
    """
    behind = mask.lstrip(b"\0")
    return (len(mask) - len(behind)) * 8 + behind[0].bit_length() - 1 if behind[0].bit_count() == 1 else None


def _mask_of(token_id: int, num_bytes: int) -> bytes:
    mask = bytearray(num_bytes)
    mask[token_id // 8] = 1 << token_id % 8
    return bytes(mask)


def _without(mask: bytes, token_ids: Sequence[int]) -> bytes:
    """Return the mask without the tokens; unchanged if the mask would be empty."""
    others = bytearray(mask)
    for token_id in token_ids:
        others[token_id // 8] &= ~(1 << token_id % 8) & 0xFF
    return bytes(others) if others.count(0) < len(others) else mask
