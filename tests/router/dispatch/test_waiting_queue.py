"""Turns: first come, first served for a client, fair between clients; and who is the shortest."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.settings.config import RouterSection
from router.dispatch.completion.state import Completion
from router.dispatch.waiting_queue import MAX_CLIENTS, Turns, WaitingQueue
from tests.support.completions import make_completion


class Bench:
    """A queue, and completions named by what they are."""

    def __init__(self) -> None:
        self.queue = WaitingQueue[Completion](RouterSection())

    def enter(self, name: str, num_tokens: int, client: str = "", priority: int = 0) -> Completion:
        completion = make_completion(name, [0] * num_tokens, client=client, priority=priority)
        self.queue.add(completion)
        return completion

    def order(self) -> list[str]:
        return [completion.spec.request_id for completion in self.queue.by_turn()]

    def take(self) -> Completion:
        """Whose turn it is, sent to a worker."""
        completion = next(self.queue.by_turn())
        self.queue.take(completion)
        return completion


def test_a_client_is_served_first_come_first_served() -> None:
    bench = Bench()
    lengths = random.Random(1).choices(range(1, 5000), k=50)
    for number, length in enumerate(lengths):
        bench.enter(str(number), length)
    assert bench.order() == [str(number) for number in range(50)]


def test_a_client_that_floods_waits_behind_itself() -> None:
    bench = Bench()
    for number in range(6):
        bench.enter(f"a{number}", 100, "a")
    bench.take()
    bench.enter("b0", 100, "b")
    bench.enter("b1", 100, "b")
    assert bench.order() == ["a1", "b0", "a2", "b1", "a3", "a4", "a5"]


def test_what_a_client_did_not_use_is_not_saved_up() -> None:
    bench = Bench()
    for number in range(40):
        bench.enter(f"a{number}", 100, "a")
    for _ in range(20):
        bench.take()
    for number in range(10):
        bench.enter(f"b{number}", 100, "b")
    begin = bench.order()[:8]
    assert sum(name.startswith("b") for name in begin) == 4


def test_many_clients_of_one_prompt_each_are_served_as_they_came() -> None:
    bench, expected = Bench(), []
    for number in range(100):
        bench.enter(f"{number}", 10 + number % 7 * 100, client=f"client {number}")
        if number % 3 == 0:
            expected.append(bench.take().spec.request_id)
    while len(bench.queue):
        expected.append(bench.take().spec.request_id)
    assert expected == [str(number) for number in range(100)]


@pytest.mark.medium
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 500)), min_size=30, max_size=80))
def test_clients_that_all_have_something_queued_get_as_many_tokens(asked: list[tuple[str, int]]) -> None:
    bench = Bench()
    for number, (client, num_tokens) in enumerate(asked):
        bench.enter(str(number), num_tokens, client)
    num_served = dict.fromkeys("abc", 0)
    clients = [client for client, _ in asked]
    while len(set(clients)) == 3:
        completion = bench.take()
        clients.remove(completion.spec.client)
        num_served[completion.spec.client] += completion.num_tokens
        if len(set(clients)) == 3:
            assert max(num_served.values()) - min(num_served.values()) <= 2 * 500


def test_priority_is_before_turn_and_length() -> None:
    bench = Bench()
    bench.enter("normal", 10)
    bench.enter("late", 5, priority=1)
    bench.enter("urgent", 500, priority=-1)
    assert bench.order() == ["urgent", "normal", "late"]
    assert [completion.spec.request_id for completion in bench.queue.shortest(3)] == ["urgent"]


def test_what_was_started_comes_back_to_its_turn() -> None:
    bench = Bench()
    for name in "abcd":
        bench.enter(name, 10)
    first, second = bench.take(), bench.take()
    first.output.token_ids += [1, 2]
    bench.queue.add_again(second)
    bench.queue.add_again(first)
    assert bench.order() == ["a", "b", "c", "d"]
    assert bench.queue.num_tokens == 42


def test_whatever_is_taken_out_is_gone_from_both_orders_and_from_the_count() -> None:
    bench = Bench()
    completions = [bench.enter(str(number), 10 + number % 4, "ab"[number % 2]) for number in range(20)]
    random.Random(2).shuffle(completions)
    for completion in completions:
        bench.queue.remove(completion)
        bench.queue.remove(completion)
        assert completion not in bench.queue.shortest(20)
        assert completion.spec.request_id not in bench.order()
    assert (len(bench.queue), bench.queue.num_tokens) == (0, 0)


def test_clients_are_forgotten_beyond_a_number() -> None:
    turns = Turns()
    for number in range(MAX_CLIENTS + 10):
        turns.next(str(number), 100)
    assert turns.next("0", 100) == 0
    assert turns.next(str(MAX_CLIENTS + 9), 100) == 100
