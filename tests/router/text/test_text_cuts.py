"""Pieces of a text have the tokens of the whole, wherever it may be cut; where that is not known nothing is cut."""

import itertools
import re
import unicodedata
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

from router.text.text_cuts import CUT, LETTERS, PIECE_CHARS, cuts_of
from tests.router.made_tokenizers import CODE, END, KINDS, THINK, TURN, WHOLE, made, made_whole, splitter

EVERY_KIND = pytest.mark.parametrize("kind", KINDS)
WITHOUT_WORDS_TOO = pytest.mark.parametrize("kind", [*KINDS, WHOLE])
CHARS = ["a", "s", "S", "'", "1", " ", "\n", "\t", ".", ",", '"', "\u0301", "中", "。", "\u00a0"]
"""One of each class that expressions tell apart, what normalization joins, and what cuts are made before."""
MORE = (
    "'re 'LL don't 123 4567 the quick { } // -- e\u0301 \u1100\u1161 가 \u11a8 が \u3099 🎉👨‍👩‍👧 Ǆ \u017f ² ½ é ß שלום"
)
FRAGMENTS = [*CHARS, *f"{MORE} ไทย ा {END} {TURN} {THINK} <|im_ start|> \u037e \u212a \uff0c \u200b \ufeff".split()]
FRAGMENTS += ["  ", "    ", "\r\n", ";\n", "\u2028", "\x1c", "\x85"]
tokenizer_of, known_cuts = cache(made), cache(cuts_of)


def words(tokenizer: Tokenizer, text: str) -> list[str]:
    normal = tokenizer.normalizer.normalize_str(text) if tokenizer.normalizer else text
    return [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(normal)]


def pieces_of(tokenizer: Tokenizer, text: str, least_chars: int = 1) -> list[str]:
    cuts = known_cuts(tokenizer)
    assert cuts is not None
    pieces = cuts.pieces(text, least_chars)
    assert "".join(pieces) == text
    return pieces


@pytest.mark.medium
@EVERY_KIND
def test_words_of_all_short_texts_are_those_of_their_pieces(kind: str) -> None:
    tokenizer, num_cuts = tokenizer_of(kind), 0
    found: dict[str, list[str]] = {"": []}
    for length in range(1, 5):
        for text in map("".join, itertools.product(CHARS, repeat=length)):
            if length == 4 and not CUT.search(text, 0, length - 1):
                continue
            found[text] = words(tokenizer, text)
            for cut in range(1, length):
                if CUT.match(text, cut - 1):
                    num_cuts += 1
                    assert found[text[:cut]] + found[text[cut:]] == found[text], text
    assert num_cuts > 5000


@pytest.mark.medium
@EVERY_KIND
def test_any_character_may_stand_beside_a_cut(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    for start, stop in ((0, 0x3400), (0xA000, 0xAC00), (0xF900, 0x11000), (0x1D000, 0x1FB00)):  # others are ideographs
        chars = list(map(chr, range(start, stop)))
        text = "".join(f"a{char} b {char}中。{char}c,{char}" for char in chars)
        pieces = pieces_of(tokenizer, text)
        assert len(pieces) > 3 * len(chars)
        assert [word for piece in pieces for word in words(tokenizer, piece)] == words(tokenizer, text)


@EVERY_KIND
def test_letters_are_letters(kind: str) -> None:
    letters = "".join(filter(re.compile(f"[{LETTERS}]").match, map(chr, range(0x10000))))
    assert len(letters) > 30_000
    assert len(words(tokenizer_of(kind), letters)) == 1
    assert unicodedata.normalize("NFC", letters) == letters


@pytest.mark.medium
@WITHOUT_WORDS_TOO
@settings(max_examples=500)
@given(
    text=st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=40).map("".join), least=st.integers(1, 9)
)
def test_tokens_of_any_text_are_those_of_its_pieces(kind: str, text: str, least: int) -> None:
    tokenizer = tokenizer_of(kind)
    cuts, pieces = known_cuts(tokenizer), pieces_of(tokenizer, text, least)
    ids = [token for each in tokenizer.encode_batch(pieces, add_special_tokens=False) for token in each.ids]
    assert ids == tokenizer.encode(text, add_special_tokens=False).ids
    assert cuts is not None
    assert [*cuts.before, *ids, *cuts.after] == tokenizer.encode(text).ids


@pytest.mark.medium
def test_tokens_of_all_short_texts_without_words_are_those_of_their_lines() -> None:
    tokenizer = tokenizer_of(WHOLE)
    for length in range(1, 6):
        for text in map("".join, itertools.product(["a", "s", " ", "\n", "\u00e9", "1"], repeat=length)):
            pieces = pieces_of(tokenizer, text)
            ids = [token for piece in pieces for token in tokenizer.encode(piece, add_special_tokens=False).ids]
            assert ids == tokenizer.encode(text, add_special_tokens=False).ids, text


@WITHOUT_WORDS_TOO
def test_what_begins_alike_has_the_same_pieces(kind: str) -> None:
    text = "".join(f"The {number}th line, of many.\n" for number in range(500))
    pieces = pieces_of(tokenizer_of(kind), text, PIECE_CHARS)
    longer = pieces_of(tokenizer_of(kind), f"{text}And one more.", PIECE_CHARS)
    assert len(pieces) > 10
    assert longer[: len(pieces) - 1] == pieces[:-1]
    assert all(PIECE_CHARS <= len(piece) < PIECE_CHARS + 30 for piece in pieces[:-1])


def _with(**parts: Any) -> Tokenizer:
    tokenizer = made("Qwen 2")
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    return tokenizer


def _whole(**parts: Any) -> Tokenizer:
    tokenizer = made(WHOLE)
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    return tokenizer


def _adding(content: str, **properties: bool) -> Tokenizer:
    tokenizer = made("GPT-2", normalizers.NFC())
    tokenizer.add_tokens([AddedToken(content, **properties)])
    return tokenizer


BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
UNKNOWN = {
    "words may end with a space": lambda: _with(pre_tokenizer=splitter("", r"\S+\s?|\s+")),
    "splits that leave out": lambda: _with(
        pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(" "), "removed"), BYTES])
    ),
    "no splits": lambda: _with(pre_tokenizer=BYTES),
    "no words": lambda: _with(pre_tokenizer=None),
    "a space before each text": lambda: _with(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "Llama 2's spaces": lambda: _with(pre_tokenizer=pre_tokenizers.Metaspace()),
    "a normalizer that adds": lambda: _with(normalizer=normalizers.Prepend("▁")),
    "a normalizer that strips": lambda: _with(normalizer=normalizers.Strip()),
    "chance": lambda: _with(model=models.BPE(dropout=0.5)),
    "another model": lambda: _with(model=models.WordLevel({"a": 0}, unk_token="a")),
    "no words, but spaces": lambda: _whole(normalizer=None),
    "no words, and a token with parts of two lines": lambda: made_whole([CODE]),
    "no words, and tokens taken whole": lambda: _whole(
        model=models.BPE({"\n": 0, "a": 1}, [], ignore_merges=True)
    ),
    "no words, and no token for a line break": lambda: _whole(model=models.BPE({"a": 0}, [], byte_fallback=True)),
    "a text twice": lambda: _with(post_processor=processors.TemplateProcessing(f"$A {END} $A", None, [(END, 0)])),
    "a token with a space in it": lambda: _adding("an apple"),
    "a token with a quotation mark in it": lambda: _adding('x"y'),
    "one that is normalized to such a token": lambda: _adding('\u212a"y'),
    "a token that takes spaces along": lambda: _adding("<mask>", rstrip=True),
    "a token that takes those before it": lambda: _adding("<mask>", lstrip=True),
    "a token that is a word": lambda: _adding("fox", single_word=True),
}  # fmt: skip


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_not_known_to_be_safe_is_not_cut(name: str) -> None:
    assert cuts_of(UNKNOWN[name]()) is None


def test_the_same_without_what_is_unknown_is_cut() -> None:
    assert cuts_of(_with()) is not None
    assert cuts_of(_whole()) is not None
    assert cuts_of(_whole(model=models.BPE({"\n": 0, "a": 1}, []))) is not None
    assert cuts_of(_adding("apple")) is not None
