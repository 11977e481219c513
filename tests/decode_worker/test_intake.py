"""Handoffs among each other: nobody's stale lease or broken pull holds up or ends what others wait for."""

import time

import pytest

from common.errors import ErrorCode
from common.wire.handoff_messages import KVLease
from common.wire.packing import pack_ids, unpack_ids
from decode_worker import aborts
from decode_worker.aborts import Aborts
from tests.decode_worker.bench import Rig


def activated(rig: Rig) -> list[str]:
    return [sequence.request_id for sequence in rig.turn()]


def lost(rig: Rig) -> list[str]:
    failures = rig.intake.take_failures()
    assert {code for _, code, _ in failures} <= {ErrorCode.HANDOFF_LOST}
    return [request_id for (request_id, _), _, _ in failures]


def test_a_pull_that_fails_costs_its_sequence_and_nobody_else() -> None:
    rig = Rig()
    rig.hand_off("broken", 8, [1, 2])
    rig.hand_off("aborted", 8, [3, 4])
    rig.hand_off("well", 8, [5, 6])
    rig.turn()
    rig.intake.abort("aborted", 0)
    for copy in rig.pool.copies[:2]:
        copy.is_broken = True
    rig.end_copies()
    assert activated(rig) == ["well"]
    assert lost(rig) == ["broken"], "nobody waits for what was aborted"
    assert sorted(rig.released()) == ["aborted", "broken", "well"]
    rig.scheduler.end(*rig.scheduler.find("well", 0))
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


def test_who_was_taken_for_dead_and_hands_over_gets_its_blocks_back_at_once() -> None:
    rig = Rig()
    rig.intake.forget("p", 1)
    rig.hand_off("late", 8, [1, 2])
    assert lost(rig) == rig.released() == ["late"]


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


def test_a_handoff_whose_lease_is_in_doubt_waits_and_the_others_do_not() -> None:
    rig = Rig()
    other = rig.meet("q")
    rig.hand_off("stale", 8, [1, 2])
    rig.intake.waiting[0].lease.sure_until_s = time.monotonic() - 1
    rig.hand_off("well", 8, [3, 4], worker_id="q")
    rig.turn()
    assert len(other.copies) == 1 and not rig.pool.copies
    rig.intake.waiting[0].lease.asked_s = time.monotonic()
    rig.intake.confirm(KVLease("p", 1, ("stale",), pack_ids([0])))
    rig.turn()
    assert rig.copied() == [[1, 2]]


def test_leases_are_renewed_in_one_message_a_peer_and_lost_when_nobody_confirms() -> None:
    rig = Rig(max_num_seqs=1)
    rig.meet("q")
    for name, worker_id in (("runs", "p"), ("a", "p"), ("b", "p"), ("c", "q")):
        rig.hand_off(name, 8, [1, 2], worker_id=worker_id)
    rig.turn()
    for handoff in [*rig.intake.pulling, *rig.intake.waiting]:
        handoff.lease.asked_s -= 6.0  # of a lease of 30 s
    rig.intake._next_chores_s = 0.0
    rig.turn()
    asked = [message for message in rig.said if isinstance(message, KVLease)]
    assert [message.request_ids for message in asked] == [("a", "b", "runs"), ("c",)]
    assert unpack_ids(asked[0].attempts) == [0, 0, 0]
    for handoff in rig.intake.waiting:
        handoff.lease.sure_until_s -= 31.0
    rig.intake._next_chores_s = 0.0
    rig.turn()
    assert lost(rig) == rig.released() == ["a", "b", "c"]
    assert [handoff.sequence.request_id for handoff in rig.intake.pulling] == ["runs"]


def test_a_dead_prefill_worker_loses_what_it_kept_and_nothing_else() -> None:
    rig = Rig(max_num_seqs=2)
    rig.meet("q")
    for name, worker_id in (("pulling", "p"), ("other", "q"), ("waiting", "p")):
        rig.hand_off(name, 8, [1, 2], worker_id=worker_id)
    rig.turn()
    rig.intake.forget("p", 2)
    assert not lost(rig), "another incarnation of it"
    rig.intake.forget("p", 1)
    assert lost(rig) == ["pulling", "waiting"]
    rig.hand_off("late", 8, [1, 2])
    assert lost(rig) == ["late"]
    assert [handoff.sequence.request_id for handoff in rig.intake.pulling] == ["other"]


def test_what_waits_and_what_is_pulled_is_here() -> None:
    rig = Rig(max_num_seqs=1)
    rig.hand_off("pulled", 8, [1, 2])
    rig.hand_off("waits", 8, [3, 4])
    rig.turn()
    assert rig.scheduler.has(("pulled", 0)) and rig.intake.has(("waits", 0))
    assert not rig.intake.has(("waits", 1))


def test_an_abort_is_remembered_for_a_while_and_costs_nothing_at_each_look() -> None:
    now_s = 0.0
    remembered = Aborts(clock=lambda: now_s)
    remembered.note("a", 2)
    remembered.note("b", 0)
    now_s = 50.0
    remembered.note("a", 1)
    assert remembered.cover("a", 2) and not remembered.cover("a", 3) and not remembered.cover("c", 0)
    now_s = aborts.MEMORY_S
    remembered.forget_old()
    assert remembered.cover("a", 2) and not remembered.cover("b", 0)
    now_s += 50.0
    remembered.forget_old()
    assert len(remembered) == 0


def test_what_was_aborted_before_it_came_is_released_at_once() -> None:
    rig = Rig()
    rig.intake.abort("a", 1)
    rig.hand_off("a", 8, [1, 2], attempt=1)
    assert rig.released() == ["a"] and not rig.intake.waiting
    rig.hand_off("a", 8, [1, 2], attempt=2)
    assert len(rig.intake.waiting) == 1


def test_what_can_never_be_decoded_here_is_refused_and_nobody_waits_behind_it() -> None:
    rig = Rig(num_blocks=10, max_len=35)
    rig.progress("long", 20, [1, 2, 3])
    rig.hand_off("long", 20, [1, 2, 3, 4, 5])  # and up to 16 outputs
    rig.hand_off("huge", 100, list(range(1, 26)))
    rig.hand_off("uneven", 8, [1, 2, 3])
    rig.hand_off("well", 20 - 1, [6, 7, 8, 9, 10])
    rig.end_copies()
    rig.turn()
    rig.end_copies()
    assert activated(rig) == ["well"]
    failures = {request_id: (code, reason) for (request_id, _), code, reason in rig.intake.take_failures()}
    assert {name: code for name, (code, _) in failures.items()} == {
        "long": ErrorCode.NEVER_FITS,
        "huge": ErrorCode.NEVER_FITS,
        "uneven": ErrorCode.INTERNAL,
    }
    assert "36 tokens" in failures["long"][1] and "at most 35" in failures["long"][1]
    assert sorted(rig.released()) == ["huge", "long", "uneven", "well"]
    rig.scheduler.end(*rig.scheduler.find("well", 0))
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
