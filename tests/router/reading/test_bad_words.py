"""Bad words as tokens: with a space before them and without."""

import json
from pathlib import Path

import pytest
import tokenizers

from common.base.errors import RequestError
from common.settings.config import ModelSection
from common.wire.values.packing import unpack_ids
from common.wire.values.sampling_params import MAX_WORD_TOKENS, SamplingParams
from router.reading.reading import packed_words, parse_body, tokenized
from router.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def ours(model_dir: Path) -> Tokenizer:
    return Tokenizer(ModelSection(path=str(model_dir)))


def banned(ours: Tokenizer, *words: str) -> list[list[int]]:
    return [unpack_ids(packed) for packed in packed_words(words, ours)]


def test_a_word_is_banned_with_a_space_before_it_and_without(ours: Tokenizer, tokenizer: tokenizers.Tokenizer) -> None:
    ways = {word: [tokenizer.encode(text).ids for text in (word, f" {word}")] for word in ("fox", "quick", "the")}
    for word, both in ways.items():
        for text in (word, f" {word}", f"   {word}"):
            assert banned(ours, text) == both
    assert banned(ours, "fox", " the", "fox") == [*ways["fox"], *ways["the"]]
    assert banned(ours, "\n")[0] == tokenizer.encode("\n").ids
    assert banned(ours, " ")[0] == tokenizer.encode(" ").ids


def test_a_way_that_ends_in_the_other_is_left_out(ours: Tokenizer, tokenizer: tokenizers.Tokenizer) -> None:
    word = next(word for word in "ABCXYZ" if tokenizer.encode(f" {word}").ids[1:] == tokenizer.encode(word).ids)
    assert banned(ours, word) == [tokenizer.encode(word).ids]


def test_a_word_of_too_many_tokens_is_refused_by_name(ours: Tokenizer) -> None:
    assert [len(ids) for ids in banned(ours, "0" * MAX_WORD_TOKENS)] == [MAX_WORD_TOKENS]
    with pytest.raises(
        RequestError, match=f"'00000.*{MAX_WORD_TOKENS + 1} tokens: at most {MAX_WORD_TOKENS}"
    ) as caught:
        banned(ours, "fox", "0" * (MAX_WORD_TOKENS + 1))
    assert (caught.value.status, caught.value.param) == (400, "bad_words")


def test_they_are_part_of_what_tokens_are_sampled_by(ours: Tokenizer) -> None:
    data = json.dumps({"prompt": "a", "bad_words": ["fox"]}).encode()
    request = tokenized(parse_body(data, ours.info), ours, 100)
    assert request.sampling.bad_words == packed_words(["fox"], ours)
    assert request.sampling.adjusts_logits and not SamplingParams().adjusts_logits
    assert tokenized(request, ours, 100).sampling == request.sampling
