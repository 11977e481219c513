"""Which prompts a step holds; what follows over time is in `tests/scheduling`."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.serving.prompts.order import PromptOrder


@dataclass(eq=False)
class Piece:
    name: str
    num_left: int
    turn: int
    priority: int = 0
    is_started: bool = False
    has_blocks: bool = False


def start(prompt: Piece) -> bool:
    prompt.is_started = True
    return True


def step(order: PromptOrder, prompts: list[Piece], may_start: Callable[[Piece], bool] = start) -> list[tuple[str, int]]:
    """The next step, after which its tokens are computed and what is complete is gone."""
    pieces = order.next_step(prompts, may_start)
    for prompt, num_tokens in pieces:
        prompt.num_left -= num_tokens
    prompts[:] = [prompt for prompt in prompts if prompt.num_left]
    return [(prompt.name, num_tokens) for prompt, num_tokens in pieces]


def test_turns_decide_between_prompts_of_one_length() -> None:
    prompts = [Piece("c", 40, 3), Piece("a", 40, 1), Piece("b", 40, 2)]
    assert step(PromptOrder(100, 9, 100), prompts) == [("a", 40), ("b", 40), ("c", 20)]


def test_short_prompts_overtake_with_a_third_of_the_tokens() -> None:
    order = PromptOrder(300, 64, 300)
    prompts = [Piece("long", 1000, 0), *(Piece(f"{i}", 30, 1 + i) for i in range(8))]
    assert step(order, prompts) == [("0", 30), ("1", 30), ("2", 30), ("long", 210)]
    assert step(order, prompts) == [("3", 30), ("4", 30), ("5", 30), ("long", 210)]
    assert step(order, prompts) == [("6", 30), ("7", 30), ("long", 240)]
    assert step(order, prompts) == [("long", 300)]


def test_what_is_longer_than_the_credit_overtakes_in_good_parts() -> None:
    order = PromptOrder(300, 64, 300)
    prompts = [Piece("long", 1000, 0), Piece("middle", 150, 1), Piece("short", 70, 2)]
    assert step(order, prompts) == [("short", 70), ("long", 230)], "30 tokens of credit are left: a scrap"
    assert step(order, prompts) == [("middle", 100), ("long", 200)]
    assert step(order, prompts) == [("middle", 50), ("long", 250)]


def test_a_step_is_smaller_while_prompts_overtake() -> None:
    order = PromptOrder(300, 64, 120)
    prompts = [Piece("long", 1000, 0), Piece("short", 20, 1)]
    assert step(order, prompts) == [("short", 20), ("long", 100)]
    assert step(order, prompts) == [("long", 300)]


def test_few_waiting_tokens_have_short_steps_and_a_lone_prompt_its_full_one() -> None:
    order = PromptOrder(8192, 64, 4096)
    prompts = [Piece(f"{i}", 1024, i) for i in range(9)]
    assert len(step(order, prompts)) == 8, "9,216 tokens are many"
    prompts += [Piece(f"{i}", 1024, i) for i in range(9, 16)]
    pieces = order.next_step(prompts, start, num_launched=1)
    assert sum(num_tokens for _, num_tokens in pieces) == 8192, "running steps count"
    assert step(order, prompts) == [("8", 1024), ("9", 1024)], "8,192 are few"
    assert step(order, [Piece("alone", 8192, 0)]) == [("alone", 8192)]
    pieces = order.next_step([Piece("alone", 8192, 0)], start, most=3000)
    assert [num_tokens for _, num_tokens in pieces] == [3000], "as asked"
    assert step(PromptOrder(512, 64, 4096), [Piece("a", 400, 0), Piece("b", 400, 1)]) == [("a", 400), ("b", 112)]


def test_lower_priority_numbers_come_first_and_are_not_overtaken_by_higher() -> None:
    prompts = [Piece("late", 10, 0, priority=2), Piece("first", 500, 9, priority=-1), Piece("second", 20, 5)]
    order = PromptOrder(200, 64, 200)
    assert step(order, prompts) == [("first", 200)]
    prompts.append(Piece("urgent", 300, 10, priority=-2))
    assert step(order, prompts) == [("urgent", 200)]
    assert step(order, prompts) == [("urgent", 100), ("first", 100)]
    assert step(order, prompts) == [("first", 200)]
    assert step(order, prompts) == [("second", 20), ("late", 10)]


def test_one_prompt_a_step_still_lets_short_ones_pass() -> None:
    order = PromptOrder(90, 1, 90)
    prompts = [Piece("long", 300, 0), Piece("a", 20, 1), Piece("b", 20, 2)]
    assert [step(order, prompts) for _ in range(4)] == [[("a", 20)], [("long", 90)], [("b", 20)], [("long", 90)]]


def test_those_that_overtake_leave_a_place_for_the_one_whose_turn_it_is() -> None:
    prompts = [Piece("long", 300, 0), *(Piece(f"{i}", 1, 1 + i) for i in range(9))]
    assert step(PromptOrder(90, 3, 90), prompts) == [("0", 1), ("1", 1), ("long", 88)]


def test_without_chunking_a_prompt_has_one_piece_and_perhaps_a_step_of_its_own() -> None:
    order = PromptOrder(90, 9, 90, chunking=False)
    prompts = [Piece("long", 300, 0), Piece("a", 20, 1), Piece("b", 80, 2)]
    assert [step(order, prompts) for _ in range(3)] == [[("a", 20)], [("long", 300)], [("b", 80)]]


lengths = st.lists(st.integers(1, 400), min_size=1, max_size=25)


@given(lengths, st.integers(16, 200), st.integers(1, 5), st.integers(16, 200), st.booleans())
def test_steps_keep_their_limits_and_everything_is_computed(
    lengths: list[int], max_tokens: int, max_seqs: int, max_mixed_tokens: int, chunking: bool
) -> None:
    order = PromptOrder(max_tokens, max_seqs, max_mixed_tokens, chunking)
    prompts = [Piece(str(turn), length, turn) for turn, length in enumerate(lengths)]
    num_computed = 0
    while prompts:
        pieces = step(order, prompts)
        num_tokens = sum(num for _, num in pieces)
        assert 0 < len(pieces) <= max_seqs
        assert num_tokens <= max_tokens or (len(pieces) == 1 and not chunking)
        num_computed += num_tokens
    assert num_computed == sum(lengths)


@pytest.mark.medium
@given(st.data(), lengths, st.integers(16, 200))
def test_no_prompt_is_put_off_beyond_half_of_what_is_before_it(
    data: st.DataObject, lengths: list[int], max_tokens: int
) -> None:
    """Whatever arrives: what is before it by turn, half as many tokens, a third of a step, and the rest of one."""
    order = PromptOrder(max_tokens, 64, max_tokens)
    prompts = [Piece(str(turn), length, turn) for turn, length in enumerate(lengths)]
    before = {prompt.name: sum(lengths[: prompt.turn + 1]) for prompt in prompts}
    num_computed, turn = 0, len(lengths)
    while any(prompt.name in before for prompt in prompts):
        for length in data.draw(st.lists(st.integers(1, 100), max_size=4)):
            prompts.append(Piece(f"later {turn}", length, turn))
            turn += 1
        waiting = {prompt.name for prompt in prompts}
        num_computed += sum(num for _, num in step(order, prompts))
        for name in (waiting - {prompt.name for prompt in prompts}) & set(before):
            assert num_computed <= 1.5 * before[name] + max_tokens / 3 + max_tokens


@pytest.mark.parametrize("blocked", [True, False])
def test_nothing_starts_by_turn_behind_a_prompt_that_cannot_start(blocked: bool) -> None:
    order = PromptOrder(90, 9, 90)
    prompts = [Piece("running", 20, 0, is_started=True), Piece("large", 50, 1), Piece("later", 60, 2)]

    def may_start(prompt: Piece) -> bool:
        return prompt.name != "large" or not blocked

    expected = [("running", 20)] if blocked else [("running", 20), ("large", 50), ("later", 20)]
    assert step(order, prompts, may_start) == expected


def test_what_is_cut_off_a_piece_is_for_others_and_earns_no_credit() -> None:
    order = PromptOrder(300, 64, 300)
    order.credit = 0
    long, short = Piece("long", 1000, 0), Piece("short", 150, 1)
    pieces = order.next_step([long, short], start, cut=lambda prompt, num_tokens: min(num_tokens, 240))
    assert [(prompt.name, num_tokens) for prompt, num_tokens in pieces] == [("long", 240), ("short", 60)]
    order.credit = 0
    order.next_step([long], start, cut=lambda prompt, num_tokens: min(num_tokens, 100))
    assert order.credit == 50
