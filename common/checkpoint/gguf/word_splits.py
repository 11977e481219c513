"""Splits of texts into words before merges, by the names that GGUF files have for them.

A file names a split (`tokenizer.ggml.pre`) and does not hold it. A wrong split changes tokens silently, so names that
are not here are refused.
"""

from typing import NamedTuple

from common.base.json_file import JsonObject

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


class WordSplit(NamedTuple):
    """Steps before the merges of a byte-level tokenizer."""

    steps: tuple[JsonObject, ...]  # of tokenizer.json's pre-tokenizer, before bytes become letters
    is_gpt2: bool = False  # GPT-2's own split follows the steps
    composes: bool = False  # texts are normalized to NFC
    ignores_merges: bool = False  # a word that is a token needs no merges
    adds_begin: bool = False  # the token of the beginning stands before each text, if the file does not say


def _regex(pattern: str) -> JsonObject:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _by_letters(letters: str, number: str) -> JsonObject:
    others = rf"[^\s{letters.strip('[]')}\p{{N}}]"
    return _regex(
        rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?{letters}+|{number}| ?{others}+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


def _by_case(ending: str, number: str) -> JsonObject:
    before = r"[^\r\n\p{L}\p{N}]?"
    return _regex(
        rf"{before}{UPPER}*{LOWER}+{ending}|{before}{UPPER}+{LOWER}*{ending}|{number}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


LLAMA3 = WordSplit((_by_letters(r"\p{L}", r"\p{N}{1,3}"),), ignores_merges=True, adds_begin=True)
QWEN2 = WordSplit((_by_letters(r"\p{L}", r"\p{N}"),), composes=True)
QWEN35 = WordSplit((_by_letters(r"[\p{L}\p{M}]", r"\p{N}"),), composes=True)
TEKKEN = WordSplit((_by_case("", r"\p{N}"),), ignores_merges=True, adds_begin=True)
GPT4O = WordSplit((_by_case(f"{CONTRACTIONS}?", r"\p{N}{1,3}"),))
GPT2 = WordSplit((), is_gpt2=True)
SMOLLM = WordSplit(({"type": "Digits", "individual_digits": True},), is_gpt2=True)

WORD_SPLITS = {
    "llama3": LLAMA3,
    "llama-v3": LLAMA3,
    "llama-bpe": LLAMA3,
    "qwen2": QWEN2,
    "qwen35": QWEN35,
    "tekken": TEKKEN,
    "gpt-4o": GPT4O,
    "gpt-2": GPT2,
    "smollm": SMOLLM,
}
