"""Where a text may be cut: its pieces, each alone, have the tokens that it has as a whole.

A tokenizer takes added tokens out of a text, normalizes what is between them, splits that into words by a regular
expression, and merges the bytes of each word. So a cut is safe where no added token and no word goes on, and where
neither side's words depend on the other side. With the tokenizers known here that is so

- before a space, behind anything but white space: white space is only at the beginning of a word, or is all of it, and
  an expression looks ahead, to the end of the text too, behind white space only;
- before a comma, a quotation mark or a stop of Chinese, behind a letter: no word goes on with one of them.

To normalize (NFC) joins none of these characters with what is before it. Of other tokenizers no text is cut.
"""

import json
import re
import unicodedata
from array import array
from dataclasses import dataclass
from typing import Any

import tokenizers

from router.text.prompts import TokenIds

PIECE_CHARS = 1024
"""A piece ends at the first safe place behind so many; what follows the last is encoded again in a longer text."""
LETTERS = "A-Za-z\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3"
"""Not all there are, but these are letters in every version of Unicode, and stay as they are in NFC."""
CUT = re.compile(rf'\S(?= )|[{LETTERS}](?=[",\uff0c\u3002\u3001\uff01\uff1f])')
"""Matches what is before a cut."""
WORDS = {
    name: r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
    + number
    + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    for name, number in (("Qwen 2", r"\p{N}"), ("Llama 3", r"\p{N}{1,3}"))
}
"""Expressions, by who began with them, for which this was shown; so it was for GPT-2's, which `ByteLevel` has."""


@dataclass(frozen=True, slots=True)
class Cuts:
    """Those of a tokenizer's texts, and the tokens that the model puts around a whole one."""

    before: TokenIds
    after: TokenIds

    def pieces(self, text: str, least_chars: int = PIECE_CHARS) -> list[str]:
        """The text in pieces, all but the last of at least `least_chars`."""
        found, begin = [], 0
        while cut := CUT.search(text, begin + least_chars - 1):
            found.append(text[begin : cut.end()])
            begin = cut.end()
        return [*found, text[begin:]]


def cuts_of(tokenizer: tokenizers.Tokenizer) -> Cuts | None:
    """Those that are known to be safe, if any are."""
    model: Any = tokenizer.model
    if not isinstance(model, tokenizers.models.BPE) or model.dropout:
        return None
    if _state(tokenizer.normalizer).get("type", "NFC") != "NFC" or not _splits_words(_state(tokenizer.pre_tokenizer)):
        return None
    for token in tokenizer.get_added_tokens_decoder().values():
        texts = (token.content, unicodedata.normalize("NFC", token.content))
        if token.lstrip or token.rstrip or token.single_word or any(map(CUT.search, texts)):
            return None  # it heeds what is beside it, or a cut may be within it
    return _around(tokenizer)


def _splits_words(pre_tokenizer: dict[str, Any]) -> bool:
    """Whether it splits by known expressions, and then writes bytes as letters."""
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    *splits, last = steps or [{}]
    if last.get("type") != "ByteLevel" or last["add_prefix_space"]:
        return False
    return all(map(_is_known, splits)) and bool(splits or last["use_regex"])


def _is_known(step: dict[str, Any]) -> bool:
    known = [{"Regex": words} for words in WORDS.values()]
    return (
        step["type"] == "Split"
        and step["pattern"] in known
        and step["behavior"] == "Isolated"
        and step["invert"] is False
    )


def _around(tokenizer: tokenizers.Tokenizer) -> Cuts | None:
    (inner,) = tokenizer.encode_batch(["a"], add_special_tokens=False)
    (whole,) = tokenizer.encode_batch(["a"], add_special_tokens=True)
    is_around = whole.special_tokens_mask
    begin = is_around.index(0) if 0 in is_around else 0
    end = begin + len(inner.ids)
    if not inner.ids or whole.ids[begin:end] != inner.ids or not all(is_around[end:]):
        return None
    return Cuts(array("i", whole.ids[:begin]), array("i", whole.ids[end:]))


def _state(part: Any) -> dict[str, Any]:
    """A part of a tokenizer as tokenizer.json has it."""
    state: dict[str, Any] = json.loads(part.__getstate__()) if part is not None else {}
    return state
