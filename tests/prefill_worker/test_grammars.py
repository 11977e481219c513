"""Prompts under a grammar: they wait for its word, alone, and whatever it says leaves nothing behind."""

from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
import pytest

from common.base.errors import ErrorCode
from common.grammar.follower import Follower, Outcome
from common.grammar.followers import Followers
from common.grammar.sequence_grammars import SequenceGrammars
from common.wire.messages.worker import Abort, FinishReason, TokenBatch
from common.wire.values.sampling_params import SamplingParams
from prefill_worker.sequence import PrefillSequence
from tests.prefill_worker.test_worker import TOKEN, VOCAB, Rig, until
from tests.support.messages import prefill_request

MASK = np.full(VOCAB // 32, -1, np.int32)
ALL = Outcome(MASK)


class ToldFollowers:
    """Says what the test says."""

    def __init__(self) -> None:
        self.asked: dict[str, tuple[PrefillSequence, list[int]]] = {}
        self.outcomes: list[tuple[PrefillSequence, Outcome]] = []

    def ask(self, owner: PrefillSequence, follower: Follower, token_ids: Sequence[int]) -> None:
        assert owner.request.request_id not in self.asked, "one thing at a time"
        self.asked[owner.request.request_id] = owner, list(token_ids)

    def say(self, name: str, outcome: Outcome) -> None:
        self.outcomes.append((self.asked.pop(name)[0], outcome))

    def take(self) -> list[tuple[PrefillSequence, Outcome]]:
        taken, self.outcomes = self.outcomes, []
        return taken

    @property
    def num_pending(self) -> int:
        return len(self.asked) + len(self.outcomes)

    def close(self) -> None:
        pass


class GuidedRig(Rig):
    """A prefill worker whose grammars say what the test says."""

    def __init__(self) -> None:
        super().__init__(max_batch_tokens=64)
        self.worker.grammars.followers.close()
        self.followers = ToldFollowers()
        self.worker.grammars = self.worker.inbox.grammars = self.worker.outputs.grammars = SequenceGrammars(
            cast(Followers[PrefillSequence], self.followers)
        )

    def begin(self, name: str, num_tokens: int = 20, **sampling: Any) -> None:
        """A prompt under a grammar whose last chunk is launched."""
        self.ask(name, num_tokens, grammar="some", **sampling)
        self.followers.say(name, ALL)
        self.turn_until(lambda: any(chunk.is_last for step in self.steps for chunk in step.chunks))

    def finish(self, name: str) -> None:
        """Its token is sampled, and the grammar asked."""
        for step in self.steps:
            step.over = True
        self.turn_until(lambda: name in self.followers.asked)

    def reasons(self) -> list[int]:
        return [reason for m in self.said if isinstance(m, TokenBatch) for reason in m.finish_reasons]


@pytest.fixture
def rig() -> Iterator[GuidedRig]:
    rig = GuidedRig()
    yield rig
    rig.close()


def test_a_prompt_waits_for_its_mask_and_others_do_not(rig: GuidedRig) -> None:
    rig.ask("held", 20, grammar="some")
    rig.ask("free", 30)
    rig.turn()
    assert rig.launched() == [[30]] and rig.followers.asked["held"][1] == []
    rig.followers.say("held", ALL)
    rig.turn()
    assert rig.launched() == [[30], [20]]
    [chunk] = rig.steps[1].chunks
    assert chunk.mask is MASK and chunk.adjusts and rig.steps[0].chunks[0].mask is None
    rig.finish("held")
    rig.turn_until(lambda: rig.with_tokens() == [h.request_id for h in rig.handed_off] == ["free"])
    assert rig.followers.asked["held"][1] == [TOKEN]
    rig.followers.say("held", ALL)
    rig.turn_until(lambda: rig.with_tokens() == [h.request_id for h in rig.handed_off] == ["free", "held"])
    assert rig.reasons() == [FinishReason.NOT_FINISHED] * 2


def test_a_text_that_its_first_token_completes_ends_there(rig: GuidedRig) -> None:
    rig.begin("a")
    rig.finish("a")
    rig.followers.say("a", Outcome(is_over=True))
    rig.turn_until(lambda: rig.with_tokens() == ["a"])
    assert rig.reasons() == [FinishReason.STOP] and not rig.handed_off
    assert rig.allocator.num_free == rig.allocator.capacity and not rig.worker.scheduler.prompts


def test_a_stop_token_needs_no_word_of_the_grammar(rig: GuidedRig) -> None:
    rig.begin("a", stop_token_ids=(TOKEN,))
    rig.steps[0].over = True
    rig.turn_until(lambda: rig.with_tokens() == ["a"])
    assert rig.reasons() == [FinishReason.STOP] and not rig.followers.asked


def test_a_replay_goes_on_behind_the_outputs(rig: GuidedRig) -> None:
    how = SamplingParams(grammar="some")
    rig.tell(prefill_request("a", range(20), sampling=how, num_outputs=4, attempt=2))
    rig.turn_until(lambda: "a" in rig.followers.asked)
    assert rig.followers.asked["a"][1] == [16, 17, 18, 19]


@pytest.mark.parametrize(
    ("outcome", "code"),
    [
        (Outcome(problem="no token can follow"), ErrorCode.GRAMMAR),
        (Outcome(is_over=True), ErrorCode.GRAMMAR),
        (Outcome(problem="no grammars here", is_workers=True), ErrorCode.INTERNAL),
    ],
)
def test_a_grammar_without_a_beginning_fails_its_prompt(rig: GuidedRig, outcome: Outcome, code: ErrorCode) -> None:
    rig.ask("a", 20, grammar="some")
    rig.followers.say("a", outcome)
    rig.turn_until(lambda: rig.failed() == [("a", 0, code)])
    assert not rig.steps and not rig.worker.scheduler.prompts


def test_a_grammar_that_does_not_take_the_token_fails_its_prompt_and_whoever_pulls_is_told(rig: GuidedRig) -> None:
    rig.ask("a", 100, grammar="some")
    rig.followers.say("a", ALL)
    rig.turn()
    rig.steps[0].over = True
    rig.turn_until(lambda: len(rig.announced) == 1)
    rig.finish("a")
    rig.followers.say("a", Outcome(problem="too complex"))
    rig.turn_until(lambda: rig.failed() == [("a", 0, ErrorCode.GRAMMAR)] and rig.announced[-1] == ("a", []))
    assert not rig.with_tokens() and rig.allocator.num_free == rig.allocator.capacity


def test_the_last_token_that_is_wanted_counts_whatever_follows_it(rig: GuidedRig) -> None:
    rig.begin("a", max_tokens=1)
    rig.finish("a")
    rig.followers.say("a", Outcome(problem="too complex"))
    rig.turn_until(lambda: rig.with_tokens() == ["a"])
    assert rig.reasons() == [FinishReason.LENGTH] and not rig.failed()


def test_no_token_to_choose_is_the_grammars_fault(rig: GuidedRig) -> None:
    rig.begin("a")
    rig.steps[0].without_choice = {0}
    rig.steps[0].over = True
    rig.turn_until(lambda: rig.failed() == [("a", 0, ErrorCode.GRAMMAR)])
    assert rig.allocator.num_free == rig.allocator.capacity


@pytest.mark.parametrize("phase", ["before its mask", "while it is computed", "before its token is taken"])
@pytest.mark.parametrize("outcome", [ALL, Outcome(is_over=True), Outcome(problem="bad")])
def test_what_grammars_say_of_what_was_given_up_is_dropped(rig: GuidedRig, phase: str, outcome: Outcome) -> None:
    if phase == "before its mask":
        rig.ask("a", 20, grammar="some")
        sequence = rig.followers.asked["a"][0]
    else:
        rig.begin("a")
        (sequence,) = rig.worker.scheduler.prompts.values()
    if phase == "before its token is taken":
        rig.finish("a")
    rig.tell(Abort("a", 0))
    rig.turn_until(lambda: not rig.worker.scheduler.prompts)
    rig.followers.outcomes.append((sequence, outcome))
    for step in rig.steps:
        step.over = True
    for _ in range(3):
        rig.turn()
    assert not rig.with_tokens() and not rig.failed() and not rig.handed_off
    assert rig.allocator.num_free == rig.allocator.capacity
    until(lambda: not rig.worker.steps.in_flight)
