"""What has only the tokens finds of a grammar what workers, who have all of llguidance's tokenizer, find of it."""

import json
import random
from pathlib import Path

import llguidance
import numpy as np
import pytest
from tokenizers import decoders

from common.grammar.grammars import Grammars, model_tokens
from router.grammar.grammar_main import compiled, dialect_of
from router.grammar.source import GrammarSource
from router.grammar.tokens import lean_tokens, tree_of, vocabulary_of
from tests.router.made_tokenizers import KINDS, made
from tests.support.guided import DEMO_MODEL, TextFollower, random_root

ENDS = [0, 1]
REGEXES = (
    "",
    "a",
    "a*",
    "[^a]{1,40}b",
    "the quick brown fox.*",
    "(ab|cd){2,9}|ü+",
    "🎉{3}[a-z]*",
    "(?=a)b",
    "(.|\n){9}x",
)
LARK = (
    "start: <think> /[a-z]+/",
    "start: <|im_start|>",
    "start: a",
    "start: /a&b/",
    'start: "hello world" /x*/ | A\nA: /h+/',
)


@pytest.fixture(scope="module", params=["demo", *KINDS])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    if request.param == "demo":
        return DEMO_MODEL, 2048
    path = tmp_path_factory.mktemp("made")
    tokenizer = made(request.param)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))
    return path, int(tokenizer.get_vocab_size()) + 7


def sources() -> list[GrammarSource]:
    rng = random.Random(5)
    schemas = [json.dumps(random_root(rng)) for _ in range(25)]
    return [
        *(GrammarSource("regex", text) for text in REGEXES),
        *(GrammarSource("grammar", text) for text in LARK),
        *(GrammarSource("json", text) for text in schemas),
    ]


@pytest.mark.medium
def test_the_same_grammars_are_taken_for_the_same_reasons(model: tuple[Path, int]) -> None:
    whole = model_tokens(*model, ENDS)
    lean = tree_of(vocabulary_of(whole))
    assert (lean.vocab_size, lean.eos_token, lean.eos_tokens) == (whole.vocab_size, whole.eos_token, whole.eos_tokens)
    verdicts = set()
    for source in sources():
        outcome, expected = (compiled(source, each, dialect_of(each)) for each in (Grammars(lean), Grammars(whole)))
        assert outcome == expected, source
        verdicts.add(bool(outcome[0]))
        if outcome[0]:
            here = TextFollower(outcome[0], ENDS).follow(Grammars(lean), ())
            there = TextFollower(outcome[0], ENDS).follow(Grammars(whole), ())
            assert here.mask is not None and there.mask is not None, source
            differ = here.mask ^ there.mask  # where a text is forced, another token of it may be the one
            assert not differ.any() or np.unpackbits(there.mask.view(np.uint8)).sum() == 1, source
    assert verdicts == {True, False}


def test_all_tokens_of_a_model_are_loaded(model: tuple[Path, int]) -> None:
    lean, whole = lean_tokens(*model, ENDS), model_tokens(*model, ENDS)
    assert vocabulary_of(lean) == vocabulary_of(whole)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_that_the_model_lacks_are_none(kind: str, tmp_path: Path) -> None:
    """Gemma 3 1B has 262,144 tokens, its tokenizer one more; others could lack the last merges."""
    tokenizer = made(kind)
    tokenizer.decoder = decoders.ByteLevel()
    vocab = tokenizer.get_vocab_size()
    tokenizer.add_special_tokens(["<image>"])
    assert tokenizer.token_to_id("<image>") == vocab
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    texts = vocabulary_of(llguidance.LLTokenizer(tokenizer.to_str(), slices=[])).texts
    for num_tokens in (vocab, vocab - 9):
        vocabulary = vocabulary_of(model_tokens(tmp_path, num_tokens, ENDS))
        assert vocabulary.texts == texts[:num_tokens] and vocabulary.end_ids == ENDS
        assert vocabulary_of(lean_tokens(tmp_path, num_tokens, ENDS)) == vocabulary


def test_an_end_that_the_model_lacks_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "tokenizer.json").write_bytes((DEMO_MODEL / "tokenizer.json").read_bytes())
    assert model_tokens(tmp_path, 2040, [0, 2045]).eos_tokens == [0]
    assert "grammars end no text with {2045}" in caplog.text
