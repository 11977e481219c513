"""Threads that follow grammars: everybody gets an answer, in order, whatever a grammar or its library does."""

import json
import random
import time
from collections.abc import Sequence
from threading import Event

import numpy as np
import pytest

from common.grammar.follower import Follower, Outcome
from common.grammar.followers import Followers, make_followers
from common.grammar.grammars import Grammars
from tests.guided import DEMO_MODEL

DIGITS = json.dumps({"grammars": [{"lark_grammar": "start: /[0-9]{40}/"}]})


def outcomes(followers: Followers[int], num: int) -> list[tuple[int, Outcome]]:
    """So many, waited for."""
    found: list[tuple[int, Outcome]] = []
    deadline_s = time.monotonic() + 60
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


def test_what_still_loads_is_waited_for_at_the_end() -> None:
    """A library that is imported while Python ends brings the process down."""
    has_loaded = Event()

    def load() -> Grammars:
        time.sleep(0.2)
        has_loaded.set()
        return Grammars.of_model(DEMO_MODEL, 2048, (0,))

    Followers[int](load).close()
    assert has_loaded.is_set()


class Stuck(Follower):
    """Says nothing until it is told to."""

    def __init__(self) -> None:
        super().__init__(DIGITS)
        self.may_go_on = Event()

    def follow(self, grammars: Grammars, token_ids: Sequence[int]) -> Outcome:
        assert self.may_go_on.wait(60)
        return super().follow(grammars, token_ids)


class Broken(Follower):
    """A bug."""

    def follow(self, grammars: Grammars, token_ids: Sequence[int]) -> Outcome:
        raise RuntimeError("a bug")


def test_one_that_says_nothing_is_given_up_and_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    followers: Followers[int] = make_followers(DEMO_MODEL, 2048)
    stuck = Stuck()
    followers.ask(0, stuck, ())
    followers.ask(1, Follower(DIGITS), ())
    [(owner, outcome)] = outcomes(followers, 1)
    assert owner == 1 and outcome.mask is not None and followers.num_pending == 1
    monkeypatch.setattr("common.grammar.followers.DEADLINE_S", 0.0)
    [(owner, outcome)] = outcomes(followers, 1)
    assert owner == 0 and "said nothing" in outcome.problem and followers.num_pending == 0
    monkeypatch.undo()
    stuck.may_go_on.set()
    followers.ask(2, Follower(DIGITS), ())
    assert [owner for owner, _ in outcomes(followers, 1)] == [2], "what comes too late is nobody's"
    followers.close()
    assert not followers.take()


def test_a_bug_costs_one_text(caplog: pytest.LogCaptureFixture) -> None:
    followers: Followers[int] = make_followers(DEMO_MODEL, 2048)
    for i in range(9):
        followers.ask(i, Broken(DIGITS) if i % 2 else Follower(DIGITS), ())
    found = dict(outcomes(followers, 9))
    assert all(bool(found[i].problem) == bool(i % 2) for i in range(9))
    assert "a bug" in caplog.text
    followers.close()
