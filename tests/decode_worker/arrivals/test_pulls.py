"""Handoffs among each other: nobody's lost memory server or broken pull holds up or ends what others wait for."""

import pytest

from common.base.errors import ErrorCode
from common.serving.prompts.standstill import LEAST_S, Standstill
from common.wire.messages.handoff import KVPathResult
from common.wire.messages.worker import KVPathReport
from common.wire.values.kv_layout import Counts
from tests.decode_worker.bench import Rig


def activated(rig: Rig) -> list[str]:
    return [sequence.request.request_id for sequence in rig.turn()]


def lost(rig: Rig) -> list[str]:
    failures = rig.take_failures()
    assert {code for _, code, _ in failures} <= {ErrorCode.HANDOFF_LOST}
    return [request_id for (request_id, _), _, _ in failures]


def test_a_pull_that_fails_costs_its_sequence_and_nobody_else() -> None:
    rig = Rig()
    rig.hand_off("broken", 8, [1, 2])
    rig.hand_off("aborted", 8, [3, 4])
    rig.hand_off("well", 8, [5, 6])
    rig.turn()
    rig.pulls.abort("aborted", 0)
    for copy in rig.pool.copies[:2]:
        copy.is_broken = True
    rig.end_copies()
    assert activated(rig) == ["well"]
    assert lost(rig) == ["broken"], "nobody waits for what was aborted"
    assert sorted(rig.released()) == ["aborted", "broken", "well"]
    rig.scheduler.end(rig.scheduler.active["well", 0])
    assert rig.all_free()


def test_a_pull_that_cannot_begin_costs_its_sequence_when_its_other_copies_are_over() -> None:
    rig = Rig()
    rig.progress("a", 30, [11, 12, 13])
    rig.pool.is_broken = True
    rig.hand_off("a", 30, list(range(11, 19)))
    rig.turn()
    rig.turn()
    assert not lost(rig) and not rig.all_free(), "the first copy still writes into its blocks"
    rig.end_copies()
    assert activated(rig) == []
    assert lost(rig) == rig.released() == ["a"]
    assert rig.all_free()


def test_what_is_offered_before_its_pool_is_mapped_goes_back_at_once() -> None:
    rig = Rig()
    rig.visits["p"].pool = None
    rig.hand_off("early", 8, [1, 2])
    assert lost(rig) == rig.released() == ["early"]


@pytest.mark.parametrize("how", ["begins", "goes on"])
def test_pulling_ahead_may_fail_and_the_handoff_pulls_all(how: str) -> None:
    rig = Rig()
    if how == "goes on":
        rig.progress("a", 30, [11])
    rig.pool.is_broken = True
    rig.progress("a", 30, [11, 12, 13])
    rig.pool.is_broken = False
    rig.end_copies()
    rig.turn()
    assert rig.all_free()
    rig.hand_off("a", 30, list(range(11, 19)))
    rig.turn()
    rig.end_copies()
    assert activated(rig) == ["a"]
    assert rig.copied()[-1] == list(range(11, 19))


def test_what_a_dead_prefill_worker_offered_is_pulled_and_then_its_server_is_left() -> None:
    rig = Rig(max_num_seqs=1)
    for name in ("pulling", "waiting"):
        rig.hand_off(name, 8, [1, 2])
    rig.turn()
    rig.pulls.early.forget("p", 2)
    assert rig.sources.find("p", 1) is not None, "another incarnation of it"
    rig.pulls.early.forget("p", 1)
    rig.end_copies()
    assert activated(rig) == ["pulling"] and not rig.peers["p"].is_closed
    rig.scheduler.end(rig.scheduler.active["pulling", 0])
    rig.turn()
    rig.end_copies()
    assert activated(rig) == ["waiting"] and not lost(rig)
    assert rig.peers["p"].said == [(what, name) for name in ("pulling", "waiting") for what in ("accept", "free")]
    assert rig.peers["p"].is_closed and not rig.sources.peers.by_pool


def test_what_was_offered_at_a_server_that_is_lost_is_lost_and_nothing_else() -> None:
    rig = Rig(max_num_seqs=2)
    rig.meet("q")
    rig.progress("begun", 30, [11])
    for name, worker_id in (("pulling", "p"), ("other", "q"), ("waiting", "p")):
        rig.hand_off(name, 8, [1, 2], worker_id=worker_id)
    rig.turn()
    rig.peers["p"].problem = "it closed the connection"
    rig.end_copies()
    assert activated(rig) == []
    assert lost(rig) == ["pulling", "waiting"], "what was copied last may be another's already"
    rig.turn()
    assert set(rig.sources.by_id) == {"q"} and rig.peers["p"].is_closed and not len(rig.pulls.early.ahead)
    assert rig.said == [KVPathResult("d", 1, False, "it closed the connection")]
    assert [(r.prefill_worker_id, r.error) for r in rig.reports if isinstance(r, KVPathReport)] == [
        ("p", "it closed the connection")
    ]
    assert [handoff.sequence.request.request_id for handoff in rig.pulls.transfers.under_way] == ["other"]


def test_what_waits_and_what_is_pulled_is_here() -> None:
    rig = Rig(max_num_seqs=1)
    rig.hand_off("pulled", 8, [1, 2])
    rig.hand_off("waits", 8, [3, 4])
    rig.turn()
    assert ("pulled", 0) in rig.scheduler.reserved and ("waits", 0) in rig.pulls.waiting
    assert ("waits", 1) not in rig.pulls.waiting


def test_blocks_that_cannot_be_the_prompts_are_refused_and_no_handoff_waits_behind_them() -> None:
    rig = Rig(num_blocks=10)
    rig.hand_off("uneven", 8, [1, 2, 3, 4])
    rig.hand_off("well", 20 - 1, [6, 7, 8, 9, 10])
    rig.turn()
    rig.end_copies()
    assert activated(rig) == ["well"]
    [(key, code, reason)] = rig.take_failures()
    assert (key, code) == (("uneven", 0), ErrorCode.INTERNAL) and "4 blocks offered" in reason
    assert sorted(rig.released()) == ["uneven", "well"]
    rig.scheduler.end(rig.scheduler.active["well", 0])
    assert rig.all_free()


def test_progress_that_no_prompt_makes_is_ignored_and_ends_no_worker() -> None:
    rig = Rig()
    rig.progress("a", 7, [1, 2])  # two blocks are eight tokens
    assert rig.all_free() and not rig.copied()
    rig.progress("b", 8, [1])
    rig.progress("b", 100, list(range(1, 20)))  # more than the prompt that was begun
    rig.end_copies()
    rig.turn()
    assert rig.all_free()


def test_who_waits_for_a_row_asks_for_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of our own pool bring theirs, and would take each row that comes free."""
    rig, asked = Rig(max_num_seqs=1), list[Counts]()

    def fetch(counts: Counts) -> bool:
        asked.append(counts)
        return True

    rig.hand_off("decoded", 8, [1, 2])
    rig.turn()
    rig.end_copies()
    rig.turn()
    monkeypatch.setattr(rig.allocator, "fetch", fetch)
    rig.hand_off("waits", 8, [3, 4])
    assert not rig.pulls.prepare_next() and not rig.pulls.transfers.under_way
    assert asked == [(3 + 1,)], "for its tokens, and for the other to grow"


def test_what_no_blocks_come_free_for_goes_back_and_nothing_that_only_has_to_wait() -> None:
    """As its own pool may be full of what waits for ours; one at a time, as the first may be enough."""
    now_s = 0.0
    rig = Rig(num_blocks=20)
    rig.pulls.standstill = Standstill(clock=lambda: now_s, chance=lambda: 0.5)
    rig.hand_off("decoded", 8, [1, 2])
    rig.turn()
    rig.end_copies()
    rig.turn()
    [others] = rig.allocator.allocate((14,))
    rig.allocator.release(others)
    for name in ("first", "second"):
        rig.hand_off(name, 40, list(range(20, 30)))
    rig.turn()
    now_s = 100.0
    rig.turn()
    assert ("first", 0) in rig.pulls.waiting, "blocks of what is decoded come free"
    rig.scheduler.end(rig.scheduler.active["decoded", 0])
    rig.start()
    rig.pulls.check()
    now_s += 1.5 * LEAST_S - 0.1
    rig.pulls.check()
    assert ("first", 0) in rig.pulls.waiting and rig.take_failures() == []
    now_s += 0.1
    rig.pulls.check()
    [(key, code, _)] = rig.take_failures()
    assert (key, code) == (("first", 0), ErrorCode.STANDSTILL) and ("decline", "first") in rig.peers["p"].said
    rig.pulls.check()
    assert ("second", 0) in rig.pulls.waiting, "as long again"
    for _ in range(10):
        now_s += LEAST_S
        rig.engine.shared.num_done += 1
        rig.pulls.check()
    assert ("second", 0) in rig.pulls.waiting, "somebody gets on in the pool, whose blocks come free"
    rig.allocator.take_back(others)
    rig.turn()
    assert ("second", 0) in rig.scheduler.reserved
    now_s += 100.0
    rig.pulls.check()
    assert rig.take_failures() == []
