"""Why a text or a grammar does not go on, in the words of llguidance."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import llguidance

MAX_REASON_CHARS = 300


def reason(matcher: "llguidance.LLMatcher") -> str:
    """The first line of what is wrong, of a long one both ends; "" if nothing is."""
    found = next(iter(matcher.get_error().strip().splitlines()), "")
    half = MAX_REASON_CHARS // 2
    return found if len(found) <= MAX_REASON_CHARS else f"{found[:half]}...{found[-half:]}"
