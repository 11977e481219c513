"""Safe cuts of a text: the pieces, encoded separately, give the tokens of the whole text.

A tokenizer first takes added tokens out of a text and normalizes the rest. A regular expression splits the rest into
words, and the bytes of each word are merged. So a cut is safe outside of added tokens and words, if the words on either
side do not depend on the other side. For the known tokenizers, safe cuts are:

- before a space, behind anything but white space. White space only begins a word, or is all of a word. An expression
  looks ahead, also to the end of the text, only behind white space.
- before a comma, a quotation mark or a Chinese stop, behind a letter. No word continues with such a character.

Normalization (NFC) joins none of these characters with the preceding text.

A tokenizer like Gemma's has no words: it merges a whole text. There, a cut is safe between the last of several line
breaks and the next character, if no token has both. Texts of other tokenizers are not cut.
"""

import json
import re
import unicodedata
from array import array
from dataclasses import dataclass

import tokenizers

from common.base.json_file import JsonObject
from router.text.prompts import TokenIds

PIECE_CHARS = 1024
"""Least characters of a piece, which ends at the next safe cut. The last piece is encoded again in a longer text."""
LETTERS = "A-Za-z\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3"
"""Some letters: letters in every version of Unicode, and unchanged by NFC."""
CUT = re.compile(rf'\S(?= )|[{LETTERS}](?=[",\uff0c\u3002\u3001\uff01\uff1f])')
"""Matches the character before a cut between words."""
LINE_CUT = re.compile(r"\n(?=[^\n])")
"""Matches the character before a cut between lines."""
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
WORDS = {
    name: rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?{letters}+|{number}"
    rf"| ?[^\s{letters.strip('[]')}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    for name, letters, number in (
        ("Qwen 2", r"\p{L}", r"\p{N}"),
        ("Llama 3", r"\p{L}", r"\p{N}{1,3}"),
        ("Qwen 3.5", r"[\p{L}\p{M}]", r"\p{N}"),
    )
} | {
    name: rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{ending}|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{ending}|{number}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    for name, ending, number in (
        ("gpt-oss", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?", r"\p{N}{1,3}"),
        ("Mistral Nemo", "", r"\p{N}"),
    )
}
"""Expressions proven to allow such cuts, by the first model to use each. GPT-2's, built into `ByteLevel`, is proven
too."""
NO_SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
"""Normalizer of tokenizers without words."""
SPLIT_AT_SPACES = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
"""Pre-tokenizer without effect behind that normalizer."""


@dataclass(frozen=True, slots=True)
class Cuts:
    """Cutting of a tokenizer's texts, with the special tokens around a whole text."""

    cut: re.Pattern[str]  # matches the character before a cut
    before: TokenIds
    after: TokenIds

    def pieces(self, text: str, least_chars: int = PIECE_CHARS) -> list[str]:
        """Return the text in pieces, all but the last with at least `least_chars` characters."""
        found, begin = [], 0
        while cut := self.cut.search(text, begin + least_chars - 1):
            found.append(text[begin : cut.end()])
            begin = cut.end()
        return [*found, text[begin:]]


def cuts_of(tokenizer: tokenizers.Tokenizer) -> Cuts | None:
    """Return the safe cuts of a tokenizer, None if none are known."""
    cut = _cut_of(tokenizer)
    if cut is None:
        return None
    for token in tokenizer.get_added_tokens_decoder().values():
        texts = (token.content, unicodedata.normalize("NFC", token.content))
        if token.lstrip or token.rstrip or token.single_word or any(map(cut.search, texts)):
            return None  # depends on adjacent text, or may contain a cut
    return _around(tokenizer, cut)


def _cut_of(tokenizer: tokenizers.Tokenizer) -> re.Pattern[str] | None:
    """Return the cuts between words or lines, None if neither is safe."""
    model, normalizer = tokenizer.model, _state(tokenizer.normalizer)
    if not isinstance(model, tokenizers.models.BPE) or model.dropout:
        return None
    splitter = _state(tokenizer.pre_tokenizer)
    if normalizer.get("type", "NFC") == "NFC" and _splits_words(splitter):
        return CUT
    is_whole = normalizer == NO_SPACES and splitter in ({}, SPLIT_AT_SPACES)
    return LINE_CUT if is_whole and _merges_within_lines(tokenizer, model) else None


def _merges_within_lines(tokenizer: tokenizers.Tokenizer, model: tokenizers.models.BPE) -> bool:
    """Tell whether no merge joins a line break with the next line, however the text goes on."""
    if model.ignore_merges or model.continuing_subword_prefix or model.end_of_word_suffix:
        return False
    tokens = tokenizer.get_vocab(with_added_tokens=False)
    return "\n" in tokens and not any(map(LINE_CUT.search, tokens))


def _splits_words(pre_tokenizer: JsonObject) -> bool:
    """Tell whether a pre-tokenizer splits by known expressions, then writes bytes as letters."""
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    *splits, last = steps or [{}]
    if last.get("type") != "ByteLevel" or last["add_prefix_space"]:
        return False
    return all(map(_is_known, splits)) and bool(splits or last["use_regex"])


def _is_known(step: JsonObject) -> bool:
    known = [{"Regex": words} for words in WORDS.values()]
    return (
        step["type"] == "Split"
        and step["pattern"] in known
        and step["behavior"] == "Isolated"
        and step["invert"] is False
    )


def _around(tokenizer: tokenizers.Tokenizer, cut: re.Pattern[str]) -> Cuts | None:
    (inner,) = tokenizer.encode_batch(["a"], add_special_tokens=False)
    (whole,) = tokenizer.encode_batch(["a"], add_special_tokens=True)
    is_around = whole.special_tokens_mask
    begin = is_around.index(0) if 0 in is_around else 0
    end = begin + len(inner.ids)
    if not inner.ids or whole.ids[begin:end] != inner.ids or not all(is_around[end:]):
        return None
    return Cuts(cut, array("i", whole.ids[:begin]), array("i", whole.ids[end:]))


def _state(part: tokenizers.normalizers.Normalizer | tokenizers.pre_tokenizers.PreTokenizer | None) -> JsonObject:
    """Return a tokenizer's part in the format of tokenizer.json."""
    state: JsonObject = json.loads(part.__getstate__()) if part is not None else {}
    return state
