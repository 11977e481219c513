from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.serving.prompts.requests import Key
from common.serving.prompts.scheduler import PromptScheduler
from common.settings.config import PrefillSection
from common.wire.values.sampling_params import SamplingParams
from prefill_worker.sequence import PrefillSequence
from tests.support.allocator import check_owned
from tests.support.layouts import allocator_of, no_prefixes
from tests.support.sequences import blocks_of_prompts, ending, prompt_scheduler, prompt_sequence, taken

BLOCK_SIZE = 16


def make(num_blocks: int = 100, *, batching: bool = True, **section: object) -> PromptScheduler[PrefillSequence]:
    limits = PrefillSection(**section).on("cuda")  # type: ignore[arg-type]
    allocator = allocator_of(num_blocks, BLOCK_SIZE)
    return prompt_scheduler(limits, allocator, 1000, no_prefixes(allocator), batching=batching)


def prompt(name: str, num_tokens: int, max_tokens: int = 1) -> PrefillSequence:
    return prompt_sequence(name, [0] * num_tokens, sampling=SamplingParams(max_tokens=max_tokens))


def launch(scheduler: PromptScheduler[PrefillSequence]) -> list[tuple[str, int]]:
    """A step that is not over yet."""
    chunks = scheduler.schedule()
    scheduler.launched(chunks)
    return [(chunk.sequence.request.request_id, chunk.num_tokens) for chunk in chunks]


def plan(scheduler: PromptScheduler[PrefillSequence]) -> list[tuple[str, int]]:
    """A step, and its end."""
    plan = launch(scheduler)
    for sequence in list(ending(scheduler)):
        scheduler.allocator.free(taken(scheduler, sequence))
    return plan


def test_short_prompts_share_a_step() -> None:
    scheduler = make(max_batch_tokens=64)
    for name in "abc":
        scheduler.add(prompt(name, 20))
    assert plan(scheduler) == [("a", 20), ("b", 20), ("c", 20)]
    assert plan(scheduler) == []


def test_a_short_prompt_goes_into_the_next_step_of_a_long_one_under_way() -> None:
    scheduler = make(max_batch_tokens=64)
    scheduler.add(prompt("long", 200))
    assert plan(scheduler) == [("long", 64)]
    scheduler.add(prompt("short", 10))
    assert plan(scheduler) == [("short", 10), ("long", 54)]
    assert plan(scheduler) == [("long", 64)]


def test_without_chunking_a_prompt_is_one_piece_and_shares_only_what_fits() -> None:
    scheduler = make(max_batch_tokens=64, chunking=False)
    scheduler.add(prompt("long", 150))
    scheduler.add(prompt("a", 40))
    scheduler.add(prompt("b", 40))
    assert plan(scheduler) == [("long", 150)]
    assert plan(scheduler) == [("a", 40)]
    assert plan(scheduler) == [("b", 40)]


def test_without_batching_one_prompt_at_a_time() -> None:
    scheduler = make(batching=False)
    scheduler.add(prompt("a", 20))
    scheduler.add(prompt("b", 20))
    assert plan(scheduler) == [("a", 20)]
    assert plan(scheduler) == [("b", 20)]


def test_what_comes_free_is_kept_for_a_prompt_that_waits_for_blocks() -> None:
    scheduler = make(num_blocks=6, max_batch_tokens=96)
    scheduler.add(prompt("a", 64))
    assert launch(scheduler) == [("a", 64)]
    for name, num_tokens in (("large", 96), ("b", 30), ("c", 30)):
        scheduler.add(prompt(name, num_tokens))
    assert launch(scheduler) == [("b", 30)], "it overtakes, with credit for a third of a step"
    assert launch(scheduler) == []
    for name in "ab":
        scheduler.collected([sequence for sequence in ending(scheduler) if sequence.request.request_id == name])
        assert scheduler.remove(name, 0)
    assert launch(scheduler) == [("large", 96)]
    assert launch(scheduler) == [], "c has no blocks"


def test_a_prompt_that_overtakes_leaves_blocks_for_the_one_whose_turn_it_is() -> None:
    scheduler = make(num_blocks=4, max_batch_tokens=32)
    scheduler.add(prompt("long", 64))
    scheduler.add(prompt("short", 10))
    assert launch(scheduler) == [("long", 32)]


@pytest.mark.parametrize(("num_blocks", "max_len"), [(4, 1000), (100, 64)])
def test_a_prompt_that_no_step_and_no_pool_has_room_for_is_refused(num_blocks: int, max_len: int) -> None:
    section = PrefillSection().on("cuda")
    allocator = allocator_of(num_blocks, BLOCK_SIZE)
    scheduler = prompt_scheduler(section, allocator, max_len, no_prefixes(allocator))
    assert scheduler.objection(prompt("a", 64)) == ""
    assert "65 tokens" in scheduler.objection(prompt("b", 65)) and "at most 64" in scheduler.objection(prompt("b", 65))
    assert scheduler.objection(prompt("c", 64, max_tokens=2)), "its first output needs a place, too"


def test_a_prompt_that_will_be_decoded_brings_the_block_of_its_first_output() -> None:
    scheduler = make(num_blocks=5)
    for name, max_tokens, num_blocks in (("ends", 1, 4), ("goes on", 2, 5)):
        sequence = prompt(name, 64, max_tokens)
        scheduler.add(sequence)
        launch(scheduler)
        scheduler.collected([sequence])
        block_ids = taken(scheduler, sequence)
        assert len(block_ids) == num_blocks
        scheduler.allocator.free(block_ids)


def test_a_step_is_scheduled_while_others_are_in_flight() -> None:
    scheduler = make(max_batch_tokens=64, max_num_seqs=2)
    scheduler.add(prompt("long", 100))
    for name in "abc":
        scheduler.add(prompt(name, 10))
    assert launch(scheduler) == [("a", 10), ("long", 54)]
    assert launch(scheduler) == [("b", 10), ("long", 46)]
    assert launch(scheduler) == [("c", 10)]
    assert launch(scheduler) == []
    assert [s.key[0] for s in ending(scheduler)] == ["long", "a", "b", "c"]


def test_without_batching_steps_of_one_prompt_follow_each_other() -> None:
    scheduler = make(batching=False)
    scheduler.add(prompt("a", 20))
    scheduler.add(prompt("b", 20))
    assert launch(scheduler) == [("a", 20)]
    assert launch(scheduler) == [("b", 20)]


def test_a_prompt_removed_while_its_step_is_in_flight_gives_its_blocks_to_the_next_when_that_is_over() -> None:
    scheduler = make(num_blocks=4, max_batch_tokens=32)
    gone = prompt("a", 64)
    scheduler.add(gone)
    scheduler.add(prompt("b", 20))
    assert launch(scheduler) == [("a", 32)]
    assert scheduler.remove("a", 0)
    assert gone.ended and gone not in scheduler.prompts.values()
    assert launch(scheduler) == [] and [*map(list, blocks_of_prompts(scheduler))] == [
        [],
        [*gone.tables[0].block_ids],
    ], "a step may still write them"
    scheduler.collected([gone])
    assert launch(scheduler) == [("b", 20)] and not gone.tables
    last = ending(scheduler)[0]
    assert scheduler.remove("b", 0)
    scheduler.collected([last])
    check_owned(scheduler.allocator, [])


def test_removing_frees_blocks_wherever_the_prompt_is() -> None:
    scheduler = make(num_blocks=4)
    scheduler.add(prompt("a", 50))
    scheduler.schedule()
    scheduler.add(prompt("b", 50))
    assert scheduler.remove("a", 0)
    assert scheduler.remove("b", 5)
    assert not scheduler.remove("b", 5)
    check_owned(scheduler.allocator, [])


class Unwalked(dict[Key, PrefillSequence]):
    """Prompts of which there may be thousands."""

    def __iter__(self) -> Iterator[Key]:
        pytest.fail("each is looked at")

    def values(self) -> Any:
        pytest.fail("each is looked at")


def test_one_prompt_is_found_without_a_look_at_all_others() -> None:
    scheduler = make()
    for name in "abc":
        scheduler.add(prompt(name, 20))
    scheduler.prompts = Unwalked(scheduler.prompts)
    assert scheduler.remove("b", 0) and not scheduler.remove("b", 0) and not scheduler.remove("d", 0)
    scheduler.prompts = dict(scheduler.prompts.items())
    assert plan(scheduler) == [("a", 20), ("c", 20)] and not scheduler.prompts


def test_an_abort_of_an_older_attempt_leaves_the_newer_one() -> None:
    scheduler = make()
    newer = prompt_sequence("a", [0] * 10, attempt=2)
    scheduler.add(newer)
    assert not scheduler.remove("a", 1)
    assert [*scheduler.prompts.values()] == [newer]


@given(st.lists(st.integers(1, 300), max_size=20), st.integers(16, 200), st.booleans())
def test_every_prompt_is_computed_once_in_order_and_every_block_comes_back(
    lengths: list[int], budget: int, chunking: bool
) -> None:
    scheduler = make(num_blocks=40, max_batch_tokens=budget, chunking=chunking)
    for i, length in enumerate(lengths):
        scheduler.add(prompt(str(i), length))
    computed = dict.fromkeys(map(str, range(len(lengths))), 0)
    while scheduler.prompts:
        step = plan(scheduler)
        assert step, "the scheduler is stuck"
        assert sum(n for _, n in step) <= budget or len(step) == 1
        for name, num_tokens in step:
            computed[name] += num_tokens
    assert list(computed.values()) == lengths
    check_owned(scheduler.allocator, [])
