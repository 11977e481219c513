"""The field `bad_words`: words banned from a text, as tokens.

A word with a space before has other tokens than the word alone, so both are banned, as in vLLM. Unlike vLLM, both are
banned whatever the number of tokens. Other tokenizations of the same text are allowed, because a model seldom uses any.
"""

from collections.abc import Iterator, Sequence

from common.base.errors import RequestError
from common.wire.values.packing import pack_ids
from common.wire.values.sampling_params import MAX_WORD_TOKENS
from router.base.json_rules import shown
from router.text.tokenizer import Tokenizer


def packed_words(words: Sequence[str], tokenizer: Tokenizer) -> tuple[bytes, ...]:
    """Return the words for `SamplingParams.bad_words`; raise RequestError for a word of too many tokens."""
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
