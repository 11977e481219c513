"""Bounds of CPU time: a token, a text and all texts of a grammar each have one, and only who is over it ends."""

from collections.abc import Iterator
from typing import Any

import pytest

from common.grammar import costs as costs_module
from common.grammar.costs import OWN_S, RATE_S, SHARED_S, TOKEN_S, Costs, TextCost


@pytest.fixture(autouse=True)
def nicenesses(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    said: list[int] = []

    def nice(more: int) -> int:
        said.append(more)
        return more

    monkeypatch.setattr("common.grammar.costs.os.nice", nice)
    yield said


def test_a_token_has_a_bound() -> None:
    costs = Costs()
    assert not costs.objection(TextCost(), 1, TOKEN_S)
    assert "took 60 ms of CPU time, at most 55" in costs.objection(TextCost(), 1, 0.06)
    assert not costs.objection(TextCost(), 100, TOKEN_S + 99 * RATE_S), "a replay has many"
    assert "100 tokens took" in costs.objection(TextCost(), 100, TOKEN_S + 101 * RATE_S)


def test_texts_of_a_grammar_share_a_bound_and_only_who_used_it_ends(nicenesses: list[int]) -> None:
    costs, cheap, dear = Costs(), TextCost(), [TextCost() for _ in range(5)]
    ended: list[Any] = []
    for _ in range(2000):
        assert not costs.objection(cheap, 1, RATE_S / 10)
        for text in [text for text in dear if text not in ended]:
            if costs.objection(text, 1, 4 * RATE_S):
                ended.append(text)
    assert len(ended) == 5
    assert SHARED_S < sum(text.excess_s for text in dear) < 2 * (SHARED_S + 5 * OWN_S)
    assert nicenesses == [costs_module.NICENESS], "once"


def test_ordinary_texts_are_never_over_any_bound(nicenesses: list[int]) -> None:
    costs, texts = Costs(), [TextCost() for _ in range(32)]
    for number in range(20_000):
        assert not costs.objection(texts[number % 32], 1, 0.0002 if number % 50 else 0.002)
    assert not nicenesses


def test_a_text_that_is_dear_at_times_goes_on() -> None:
    costs, text = Costs(), TextCost()
    for number in range(5000):
        assert not costs.objection(text, 1, TOKEN_S if number % 20 == 0 else RATE_S / 10)
