"""Threads that follow grammars: everybody gets an answer, in order, whatever a grammar or its library does."""

import json
import random
import time

import numpy as np
import pytest

from common.grammar.follower import Follower, Outcome
from common.grammar.followers import Followers, make_followers
from tests.guided import DEMO_MODEL

DIGITS = json.dumps({"grammars": [{"lark_grammar": "start: /[0-9]{40}/"}]})


def outcomes(followers: Followers[int], num: int) -> list[tuple[int, Outcome]]:
    """So many, waited for."""
    found: list[tuple[int, Outcome]] = []
    deadline_s = time.monotonic() + 30
    while len(found) < num:
        found += followers.take()
        assert time.monotonic() < deadline_s, "it did not happen in time"
        time.sleep(0.001)
    return found


def test_many_texts_are_followed_side_by_side() -> None:
    followers: Followers[int] = make_followers(DEMO_MODEL, 2048)
    texts, rng = {i: Follower(DIGITS) for i in range(50)}, random.Random(5)
    lengths = dict.fromkeys(texts, 0)
    for i, follower in texts.items():
        followers.ask(i, follower, ())
    while followers.num_pending:
        for i, outcome in outcomes(followers, 1):
            if outcome.is_over:
                continue
            assert outcome.mask is not None, outcome
            allowed = np.flatnonzero(np.unpackbits(outcome.mask.view(np.uint8), bitorder="little")).tolist()
            lengths[i] += 1
            followers.ask(i, texts[i], [rng.choice(allowed)])
    assert set(lengths.values()) == {40}, "a digit is a token"
    followers.close()


def test_a_tokenizer_that_cannot_be_read_is_a_reason_for_every_text(caplog: pytest.LogCaptureFixture) -> None:
    followers: Followers[int] = make_followers(DEMO_MODEL, 7)
    for i in range(5):
        followers.ask(i, Follower(DIGITS), ())
    found = outcomes(followers, 5)
    assert sorted(i for i, _ in found) == list(range(5)) and followers.num_pending == 0
    assert all("vocab size" in outcome.problem for _, outcome in found)
    assert "can follow no grammars" in caplog.text
    followers.close()
