"""Texts made of nothing but what masks allow: valid by their grammars, whatever is chosen and where it begins anew."""

import json
import random
import re
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from common.grammar.follower import Outcome
from common.grammar.grammars import Grammars
from tests.support.guided import DEMO_MODEL, TextFollower, is_valid, random_root

MAX_TOKENS = 600
CORPUS = ['{"name": "Romeo", "age": 17, "tags": ["a", "b"], "ok": true} the quick brown fox; 你好 привет 🎉'] * 9


def write_tokenizer(path: Path, kind: str) -> tuple[Grammars, Tokenizer]:
    """Tokens as Qwen3 or Llama 3 split texts: bytes in disguise, merged, some added; smaller than the model's table."""
    split = r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    tokenizer = Tokenizer(models.BPE(ignore_merges=kind == "llama"))
    pieces = pre_tokenizers.Split(pattern=Regex(split), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pieces, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(["<|end|>", "<|turn|>"])
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.save(str(path / "tokenizer.json"))
    ends = [tokenizer.get_vocab()[token] for token in ("<|end|>", "<|turn|>")]
    return Grammars.of_model(path, tokenizer.get_vocab_size() + 93, ends), tokenizer


@pytest.fixture(scope="module", params=["demo", "qwen", "llama"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Grammars, Tokenizer]:
    if request.param == "demo":
        return Grammars.of_model(DEMO_MODEL, 2048, [0]), Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    return write_tokenizer(tmp_path_factory.mktemp(request.param), request.param)


def of_schema(schema: object) -> str:
    return json.dumps({"grammars": [{"json_schema": schema}]})


def of_regex(regex: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": f"start: /{regex}/"}]})


def allowed(outcome: Outcome) -> list[int]:
    assert outcome.mask is not None, outcome
    return np.flatnonzero(np.unpackbits(outcome.mask.view(np.uint8), bitorder="little")).tolist()


def write(model: tuple[Grammars, Tokenizer], grammar: str, rng: random.Random) -> str | None:
    """A random text of the grammar; None for one that takes too long."""
    grammars, tokenizer = model
    follower, token_ids = TextFollower(grammar, grammars.end_ids), list[int]()
    outcome = follower.follow(grammars, ())
    while len(token_ids) < MAX_TOKENS and not outcome.is_over:
        token_ids.append(rng.choice(allowed(outcome)))
        assert token_ids[-1] < grammars.vocab
        if rng.random() < 0.05:  # as after a replay
            follower = TextFollower(grammar, grammars.end_ids)
            outcome = follower.follow(grammars, token_ids)
        else:
            outcome = follower.follow(grammars, token_ids[-1:])
        assert not outcome.problem, outcome
    return tokenizer.decode(token_ids) if outcome.is_over else None


@pytest.mark.medium
def test_random_texts_of_random_schemas_are_valid(model: tuple[Grammars, Tokenizer]) -> None:
    num_valid = 0
    for seed in range(60):
        rng = random.Random(seed)
        schema = random_root(rng)
        text = write(model, of_schema(schema), rng)
        if text is not None:
            assert is_valid(text, schema), (text, schema)
            num_valid += 1
    assert num_valid > 30


def test_random_texts_of_regular_expressions_match(model: tuple[Grammars, Tokenizer]) -> None:
    for regex in (r"[a-z]{1,9}(,[0-9]+){0,3}", "(yes|no|你好)!?", r"[a-z_äß]{1,20}@[a-z]{1,20}\.(com|org)", "(ab)*"):
        for seed in range(10):
            text = write(model, of_regex(regex), random.Random(seed))
            assert text is None or re.fullmatch(regex, text), (text, regex)


def test_texts_of_added_tokens_are_spelled_where_nothing_else_may_stand(model: tuple[Grammars, Tokenizer]) -> None:
    text = "x <think>ab</think> <|end|><|turn|>ü"
    for grammar in (of_regex(re.escape(text).replace("/", r"\/")), of_schema({"const": text})):
        written = write(model, grammar, random.Random(0))
        assert written in (text, json.dumps(text, ensure_ascii=False)), written


def test_a_text_is_spelled_from_amid_a_character_too(model: tuple[Grammars, Tokenizer]) -> None:
    grammars, _ = model
    text = "ü<think>🎉".encode()
    token_ids = [grammars.first_token(text[i:]) for i in range(len(text))]
    assert TextFollower(of_regex(text.decode())).follow(grammars, token_ids).is_over


def test_a_text_that_may_not_end_goes_on_as_long_as_it_can(model: tuple[Grammars, Tokenizer]) -> None:
    grammars, _ = model
    follower = TextFollower(of_regex("x{0,9}"))
    outcome = follower.follow(grammars, ())
    num_tokens = 0
    while not outcome.is_over:
        assert not set(allowed(outcome)) & set(grammars.end_ids)
        outcome = follower.follow(grammars, [min(allowed(outcome))])
        num_tokens += 1
    assert 0 < num_tokens <= 9


def test_end_tokens_may_follow_where_a_text_may_end(model: tuple[Grammars, Tokenizer]) -> None:
    grammars, tokenizer = model
    follower = TextFollower(of_regex("(ab)+"), grammars.end_ids)
    ends = set(grammars.end_ids)
    assert not ends & set(allowed(follower.follow(grammars, ())))
    outcome = follower.follow(grammars, tokenizer.encode("ab", add_special_tokens=False).ids)
    assert ends <= set(allowed(outcome))
    assert follower.follow(grammars, [min(ends)]).is_over
    first = min(ends)
    follower = TextFollower(of_regex("(ab)+"), [first, 5])
    outcome = follower.follow(grammars, tokenizer.encode("ab", add_special_tokens=False).ids)
    assert ends & set(allowed(outcome)) == {first}, "the others end no text"


def test_end_ids_that_the_tokenizer_does_not_have_end_nothing() -> None:
    grammars = Grammars.of_model(DEMO_MODEL, 4096, [0, 3000])
    assert grammars.end_ids == (0,)
    assert TextFollower(of_regex("a"), grammars.end_ids).follow(grammars, ()).mask is not None


@pytest.mark.parametrize(
    "grammar", ["", "{", "[]", of_schema(5), of_schema({"type": "nothing"}), of_regex("("), of_regex("a{2}(?=b)")]
)
def test_what_is_no_grammar_has_a_reason(model: tuple[Grammars, Tokenizer], grammar: str) -> None:
    grammars, _ = model
    assert 0 < len(TextFollower(grammar).follow(grammars, ()).problem) < 400


def test_a_text_of_another_grammar_has_a_reason_and_stays_wrong(model: tuple[Grammars, Tokenizer]) -> None:
    grammars, tokenizer = model
    follower = TextFollower(of_regex("[0-9]+"))
    assert follower.follow(grammars, tokenizer.encode("abc", add_special_tokens=False).ids).problem
    assert follower.follow(grammars, ()).problem


def test_grammars_that_are_kept_are_followed_apart(model: tuple[Grammars, Tokenizer]) -> None:
    grammars, tokenizer = model
    grammar = of_regex("(a|b)c")
    first, second = TextFollower(grammar), TextFollower(grammar)
    before = allowed(first.follow(grammars, ()))
    first.follow(grammars, tokenizer.encode("ac", add_special_tokens=False).ids)
    assert allowed(second.follow(grammars, ())) == before
