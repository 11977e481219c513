"""Prompts that begin alike: which begin with what, and that all of it follows from the seed."""

from collections import Counter
from dataclasses import replace

import pytest

from deploy.bench.prefixes import Prefixes, conversations
from deploy.bench.workload import Lengths, Prompt, random_prompts

IDS = range(1000)
LENGTHS = Lengths.fixed(5, 3)


def prompts(count: int, prefixes: Prefixes, seed: str = "1") -> list[Prompt]:
    return prefixes.before(random_prompts(count, LENGTHS, IDS, seed), IDS, seed)


def beginnings(sent: list[Prompt], num_tokens: int) -> list[tuple[int, ...]]:
    return [tuple(prompt.token_ids[:num_tokens]) for prompt in sent]


def test_prefixes_are_dealt_out_in_turn_before_tokens_of_its_own() -> None:
    prefixes = Prefixes.parse("3x20")
    sent = prompts(9, prefixes)
    alone = [tuple(prefix.token_ids) for prefix in prefixes.drawn(IDS, "1")]
    assert beginnings(sent, 20) == alone * 3 and len(set(alone)) == 3
    assert len({tuple(prompt.token_ids[20:]) for prompt in sent}) == 9
    assert {(prompt.num_tokens, prompt.max_tokens) for prompt in sent} == {(25, 3)}
    assert sent == prompts(9, prefixes) != prompts(9, prefixes, "2")


@pytest.mark.medium
def test_by_zipfs_law_the_second_comes_half_as_often_as_the_first() -> None:
    prefixes = replace(Prefixes.parse("50x4"), zipf=1.0)
    counts = Counter(beginnings(prompts(20_000, prefixes), 4))
    first, second, *_, last = (counts[tuple(prefix.token_ids)] for prefix in prefixes.drawn(IDS, "1"))
    assert first / 20_000 == pytest.approx(1 / 4.499, rel=0.05)
    assert first / second == pytest.approx(2, rel=0.1) and first / last == pytest.approx(50, rel=0.4)
    assert str(prefixes) == "50x4 (Zipf 1)"


@pytest.mark.parametrize("text", ["", "8", "x8", "8x", "0x8", "8x0", "-1x8", "8x8x8"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="COUNTxTOKENS, for example 8x4096"):
        Prefixes.parse(text)


def test_users_have_turns_of_their_own_and_think_before_all_but_the_first() -> None:
    openings, later = random_prompts(2, LENGTHS, IDS, "openings"), random_prompts(4, LENGTHS, IDS, "later")
    talks = conversations(openings, later, 0.5, "1")
    assert [[turn.token_ids for turn in talk.turns] for talk in talks] == [
        [openings[user].token_ids, later[user].token_ids, later[user + 2].token_ids] for user in (0, 1)
    ]
    assert all(turn.returns_ids for talk in talks for turn in talk.turns)
    assert all(talk.thinks_s[0] == 0 < min(talk.thinks_s[1:]) for talk in talks)
    assert talks == conversations(openings, later, 0.5, "1")
    assert conversations(openings, later, 0, "1")[0].thinks_s == [0, 0, 0]
