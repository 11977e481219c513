"""The field `bad_words`: what no text may have, as tokens.

A word that begins with a space is one of others than the word alone, so both are banned, as vLLM does; unlike there,
however many tokens each of them has. Other ways to write the same text in tokens are not: a model seldom takes them.
"""

from collections.abc import Iterator, Sequence

from common.base.errors import RequestError
from common.wire.values.packing import pack_ids
from common.wire.values.sampling_params import MAX_WORD_TOKENS
from router.base.json_rules import shown
from router.text.tokenizer import Tokenizer


def packed_words(words: Sequence[str], tokenizer: Tokenizer) -> tuple[bytes, ...]:
    """Those of `SamplingParams`; raises RequestError for a word of too many tokens."""
    return tuple(dict.fromkeys(pack_ids(ids) for word in words for ids in _ways(word, tokenizer)))


def _ways(word: str, tokenizer: Tokenizer) -> Iterator[list[int]]:
    """Token ids of the word without and with a space before, the latter unless it ends in the former."""
    alone = word.lstrip(" ") or word
    plain, spaced = tokenizer.encode_inside([alone, f" {alone}"])
    for ids in (plain,) if spaced[-len(plain) :] == plain else (plain, spaced):
        if not 1 <= len(ids) <= MAX_WORD_TOKENS:
            message = f"bad_words has {shown(word)}, which is {len(ids)} tokens: at most {MAX_WORD_TOKENS}; ban a part"
            raise RequestError(message, param="bad_words")
        yield ids
