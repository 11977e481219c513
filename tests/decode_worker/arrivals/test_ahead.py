"""Blocks pulled while their prompt is still being computed: what is activated is right, and no block is lost."""

import random

import pytest
from msgspec.structs import replace

from common.wire.messages.handoff import DecodeRequest
from decode_worker.arrivals import ahead, early
from tests.decode_worker.bench import BLOCK_SIZE, Rig, prompt_of
from tests.support.layouts import allocator_of, take


def test_each_block_is_pulled_once_as_soon_as_it_is_complete() -> None:
    rig = Rig()
    rig.progress("a", 30, [11, 12, 13])
    rig.progress("a", 30, [11, 12, 13])
    rig.progress("a", 30, [11, 12, 13, 14, 15])
    rig.hand_off("a", 30, [11, 12, 13, 14, 15, 16, 17, 18])
    assert rig.turn() == []
    assert rig.copied() == [[11, 12, 13], [14, 15], [16, 17, 18]]
    rig.pool.copies[2].end()
    assert rig.turn() == [], "the first part is still under way"
    assert not rig.released()
    rig.end_copies()
    [sequence] = rig.turn()
    assert rig.released() == ["a"]
    targets = [target for copy in rig.pool.copies for _, target in copy.pairs]
    assert targets == sequence.tables[0].block_ids[:8].tolist()
    assert len(sequence.token_ids) == sequence.num_scheduled == 31


@pytest.mark.parametrize(
    ("num_known", "gb_per_s", "is_pulled"),
    [(16, 1e-9, False), (16, 1e9, True), (16, 0.0, True), (12, 1e-9, True), (0, 1e-9, True)],
)
def test_what_is_here_is_not_pulled_again_over_a_slow_way(num_known: int, gb_per_s: float, is_pulled: bool) -> None:
    rig = Rig()
    rig.sources.by_id["p"].gb_per_s = gb_per_s
    sequence = prompt_of("a", range(30))
    assert isinstance(sequence.request, DecodeRequest)
    sequence.request = replace(sequence.request, num_known=num_known)
    rig.announced.announce(sequence)
    rig.attempts["a"] = 0
    rig.progress("a", 30, [11, 12, 13, 14, 15])
    assert rig.copied() == ([[11, 12, 13, 14, 15]] if is_pulled else [])
    assert not rig.pulls.early.hints, "nor later"


def test_a_first_token_that_needs_a_block_of_its_own_has_one() -> None:
    rig = Rig()
    rig.progress("a", 8, [5])
    rig.hand_off("a", 8, [5, 6])
    rig.turn()
    rig.end_copies()
    [sequence] = rig.turn()
    assert rig.copied() == [[5], [6]]
    assert len(sequence.tables[0].block_ids) == 3


def test_progress_that_found_no_room_costs_nothing() -> None:
    rig = Rig(num_blocks=10)
    rig.progress("long", 100, [1, 2, 3])
    assert rig.all_free() and not rig.copied()
    rig.hand_off("short", 8, [5, 6])
    rig.turn()
    rig.end_copies()
    assert [sequence.request.request_id for sequence in rig.turn()] == ["short"]


def test_progress_that_found_no_room_is_followed_once_there_is_some() -> None:
    rig = Rig(num_blocks=12)
    rig.progress("other", 30, [21])  # takes 8 blocks
    rig.progress("a", 16, [1])
    rig.progress("a", 16, [1, 2])
    rig.turn()
    assert rig.copied() == [[21]]
    rig.progress("other", 30, [])
    rig.end_copies()
    rig.turn()
    assert rig.copied() == [[21], [1, 2]]
    rig.hand_off("a", 16, [1, 2, 3, 4])
    rig.turn()
    assert rig.copied() == [[21], [1, 2], [3, 4]] and not rig.pulls.early.hints


@pytest.mark.parametrize("how", ["abort", "newer attempt", "over", "source", "silence"])
def test_hints_of_what_does_not_come_are_forgotten(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(num_blocks=12)
    rig.progress("other", 30, [21])  # takes 8 blocks
    rig.progress("a", 16, [1], attempt=1)
    assert rig.pulls.early.hints
    match how:
        case "abort":
            rig.abort("a", 1)
        case "newer attempt":
            rig.progress("a", 16, [], attempt=2)
        case "over":
            rig.progress("a", 16, [], attempt=1)
        case "source":
            rig.pulls.early.forget("p", 1)
        case "silence":
            monkeypatch.setattr(early, "SILENCE_S", -1.0)
            rig.turn()
    rig.progress("other", 30, [])
    rig.end_copies()
    rig.turn()
    assert not rig.pulls.early.hints and rig.copied() == [[21]]


def test_blocks_of_handoffs_are_foreseen() -> None:
    rig = Rig(num_blocks=12)
    assert rig.foreseen() == (0,)
    rig.progress("other", 30, [21])  # takes 8 blocks
    rig.pulls.early.ahead.dropped += rig.pulls.early.ahead.begun.values()  # until its copy is over
    rig.pulls.early.ahead.begun.clear()
    rig.hand_off("a", 16, [1, 2, 3, 4])
    rig.hand_off("b", 8, [5, 6])
    rig.turn()
    assert rig.foreseen() == (5 + 3 + 5,), "two that wait, and one like the larger"
    rig.progress("other", 30, [])
    rig.end_copies()
    rig.turn()
    assert rig.foreseen() == (5,)


@pytest.mark.parametrize("how", ["abort", "newer attempt", "over", "source", "silence", "wanted", "shutdown"])
def test_what_does_not_come_is_given_up_when_its_copies_end(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    rig.progress("a", 30, [11, 12, 13], attempt=1)
    rig.turn()
    assert rig.num_handoffs() == 1, "who drains waits for it"
    match how:
        case "abort":
            rig.abort("a", 1)
            rig.progress("a", 30, [11, 12, 13, 14], attempt=1)  # was on its way
        case "newer attempt":
            rig.progress("a", 30, [], attempt=2)
        case "over":
            rig.progress("a", 30, [], attempt=1)
        case "source":
            rig.pulls.early.forget("p", 1)
        case "silence":
            monkeypatch.setattr(ahead, "SILENCE_S", -1.0)
        case "wanted":
            assert rig.pulls.release_blocks()
        case "shutdown":
            assert not rig.pulls.waiting
            rig.pulls.drop_all()
    rig.turn()
    assert not rig.all_free()
    rig.end_copies()
    rig.turn()
    assert rig.all_free() and len(rig.pool.copies) == 1
    assert rig.num_handoffs() == 0 and not rig.pulls.release_blocks()


def test_an_older_attempt_says_nothing_about_a_newer_one() -> None:
    rig = Rig()
    rig.progress("a", 30, [11, 12], attempt=2)
    rig.progress("a", 30, [], attempt=1)
    rig.hand_off("a", 30, [11, 12, 13, 14, 15, 16, 17, 18], attempt=2)
    rig.turn()
    assert rig.copied() == [[11, 12], [13, 14, 15, 16, 17, 18]]


def test_blocks_that_are_not_the_handoffs_do_not_count() -> None:
    rig = Rig()
    rig.progress("a", 16, [11, 12])
    rig.hand_off("a", 16, [21, 22, 23, 24])
    rig.turn()
    assert rig.copied() == [[11, 12], [21, 22, 23, 24]]
    assert not rig.pulls.early.ahead.begun, "nothing more is said of what was begun"


def test_blocks_of_the_same_number_and_another_lease_do_not_count() -> None:
    rig = Rig()
    rig.progress("a", 16, [11, 12], lease=1)
    rig.hand_off("a", 16, [11, 12, 13, 14])
    rig.turn()
    assert rig.copied() == [[11, 12], [11, 12, 13, 14]]


@pytest.mark.parametrize("when", ["it waits", "it is pulled", "it is decoded", "it is over"])
def test_what_its_offer_has_overtaken_begins_nothing(when: str) -> None:
    """Memory servers and prefill workers have sockets of their own."""
    rig = Rig(max_num_seqs=1)
    if when == "it waits":
        rig.hand_off("first", 4, [1])
        rig.turn()
    rig.hand_off("a", 30, list(range(11, 19)))
    rig.turn()
    if when in ("it is decoded", "it is over"):
        rig.end_copies()
        rig.turn()
    if when == "it is over":
        rig.scheduler.end(rig.scheduler.active["a", 0])
    num_copies = len(rig.pool.copies)
    rig.progress("a", 30, [11, 12])
    rig.turn()
    assert not rig.pulls.early.ahead and not rig.pulls.early.hints and len(rig.pool.copies) == num_copies
    rig.progress("a", 30, [11, 12], attempt=1)
    assert rig.pulls.early.ahead.begun or rig.pulls.early.hints, "another attempt, which may come here again"


def test_complete_prompts_come_before_those_that_go_on() -> None:
    rig = Rig(num_blocks=12)
    rig.progress("long", 24, [1, 2])  # takes 7 blocks
    rig.end_copies()
    rig.hand_off("complete", 30, list(range(11, 19)))  # takes 8
    rig.turn()
    rig.progress("long", 24, [1, 2, 3])
    assert rig.copied() == [[1, 2], list(range(11, 19))]
    rig.hand_off("waits", 30, list(range(21, 29)))
    rig.turn()
    rig.progress("other", 4, [9])
    assert len(rig.pool.copies) == 2, "nothing is begun while somebody waits"


class FakePrefill:
    """Computes prompts into a pool of its own, a piece at a time."""

    def __init__(self, rig: Rig, rng: random.Random) -> None:
        self.rig, self.rng = rig, rng
        self.allocator = allocator_of(60)
        self.lengths: dict[str, int] = {}
        self.computed: dict[str, int] = {}  # of prompts that go on
        self.blocks: dict[str, list[int]] = {}  # until they are aborted or released

    def begin(self, name: str) -> None:
        num_tokens = self.rng.randint(1, 44)
        num_blocks = -(-num_tokens // BLOCK_SIZE)
        if self.allocator.has((num_blocks,)):
            self.lengths[name], self.computed[name] = num_tokens, 0
            self.blocks[name] = take(self.allocator, num_blocks)

    def go_on(self, name: str) -> None:
        num_tokens, ids = self.lengths[name], self.blocks[name]
        self.computed[name] = min(num_tokens, self.computed[name] + self.rng.randint(1, 16))
        for index in range(-(-self.computed[name] // BLOCK_SIZE)):
            self.rig.pool.memory[ids[index]] = (name, index)
        if self.computed[name] < num_tokens:
            self.rig.progress(name, num_tokens, ids[: self.computed[name] // BLOCK_SIZE])
        else:
            del self.computed[name]
            self.rig.hand_off(name, num_tokens, ids)

    def abort(self, name: str) -> None:
        """Its blocks are free at once, whatever is being copied."""
        del self.computed[name]
        self.allocator.free(self.blocks.pop(name))
        self.rig.pulls.abort(name, 0)

    def take_releases(self) -> None:
        for name in self.rig.released():
            self.allocator.free(self.blocks.pop(name))
        self.rig.peers["p"].said.clear()


def happens(rng: random.Random, rig: Rig, prefill: FakePrefill, name: str) -> None:
    """Something, to somebody."""
    match rng.choices(["begin", "go on", "abort", "end", "copy"], [4, 8, 1, 2, 5])[0]:
        case "begin":
            prefill.begin(name)
        case "go on" if prefill.computed:
            prefill.go_on(rng.choice(list(prefill.computed)))
        case "abort" if prefill.computed:
            prefill.abort(rng.choice(list(prefill.computed)))
        case "end" if rig.scheduler.active:
            rig.scheduler.end(rng.choice(list(rig.scheduler.active.values())))
        case "copy" if under_way := [copy for copy in rig.pool.copies if not copy.over]:
            rng.choice(under_way).end()


@pytest.mark.medium
@pytest.mark.parametrize("seed", range(60))
def test_whatever_happens_sequences_get_their_own_blocks_and_all_come_back(seed: int) -> None:
    rng, rig, num_activated = random.Random(seed), Rig(num_blocks=30, max_num_seqs=4), 0
    prefill = FakePrefill(rig, rng)
    for number in range(400):
        happens(rng, rig, prefill, f"r{number}")
        for sequence in rig.turn():
            num_activated += 1
            num_full = -(-(len(sequence.token_ids) - 1) // BLOCK_SIZE)
            held = [rig.memory.get(block_id) for block_id in sequence.tables[0].block_ids[:num_full]]
            assert held == [(sequence.request.request_id, index) for index in range(num_full)]
        prefill.take_releases()
    assert num_activated > 10
    for name in list(prefill.computed):
        prefill.abort(name)
    while rig.num_handoffs() or rig.scheduler.active:
        rig.end_copies()
        rig.turn()
        for sequence in list(rig.scheduler.active.values()):
            rig.scheduler.end(sequence)
    assert rig.all_free()
