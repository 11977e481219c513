"""Texts have exactly the tokens that they were made of."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from deploy.bench.origin import ROOT
from deploy.bench.words import Words
from deploy.bench.workload import Lengths, Prompt, random_prompts
from tests.support.checkpoints import write_tokenizer

MODEL = ROOT / "deploy" / "demo_model"


def test_a_text_has_the_tokens_it_was_made_of() -> None:
    words, tokenizer = Words(MODEL), Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    drawn = random_prompts(20, Lengths.fixed(300, 2), words.ids, "1")
    texts = words.written(drawn)
    assert [tokenizer.encode(str(text.content), add_special_tokens=False).ids for text in texts] == [
        prompt.token_ids for prompt in drawn
    ]
    assert {len(tokenizer.encode(str(text.content)).ids) for text in texts} == {texts[0].num_tokens}
    with pytest.raises(TypeError, match="no token ids"):
        texts[0].after([1])


def test_what_would_have_other_tokens_is_not_sent(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    words = Words(tmp_path)
    words._word_of[words.ids[0]] = "a word of several tokens"
    with pytest.raises(ValueError, match="other tokens than its words alone"):
        words.written([Prompt([words.ids[0]], 1)])


def test_a_directory_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no tokenizer\.json"):
        Words(tmp_path)
