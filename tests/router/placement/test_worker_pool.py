import itertools
import logging
from typing import Any

import pytest
from msgspec.structs import replace

from common.settings.config import NetSection
from common.wire.messages.operator import MAX_WORKERS
from common.wire.messages.worker import KVPathReport, Role, WorkerReady
from common.wire.values.kv_layout import KVLayout
from router.placement.capacity import max_model_len, most_tokens
from router.placement.choice import FIRST_PATH_S, choose
from router.placement.member import NO_TRANSPORT, Member
from router.placement.readiness import MAX_TOLD, SETTLING_S, Kind, Readiness
from router.placement.roster import decode_load
from router.placement.route import LEAST, Demand
from router.placement.worker_pool import WorkerPool, forgive_silence
from tests.support.layouts import state, window
from tests.support.messages import LAYOUT, heartbeat, kv_path, worker_ready

NET = NetSection(heartbeat_s=0.5, worker_timeout_s=3.0, step_timeout_s=100.0)


def ready(worker_id: str, role: Role, epoch: int = 1, **fields: Any) -> WorkerReady:
    is_prefill = role is Role.PREFILL
    ordinary: dict[str, Any] = {
        "num_blocks": (100,),
        "max_model_len": 1000,
        "max_batch_tokens": 100 if is_prefill else 0,
        "handoff_endpoint": "" if is_prefill else "ipc:///tmp/nobody.sock",
    }
    return worker_ready(worker_id, role, epoch, **ordinary | fields)


def path(prefill: Member, decode: Member, error: str = "") -> KVPathReport:
    return kv_path(prefill.id, decode.id, prefill_epoch=prefill.epoch, epoch=decode.epoch, error=error)


def pool_of(num_prefill: int, num_decode: int) -> tuple[WorkerPool, list[Member], list[Member]]:
    """All paths proven."""
    pool = WorkerPool(NET, prefill_window=2.0)
    prefills = [pool.add(ready(f"p{i}", Role.PREFILL), 0.0) for i in range(num_prefill)]
    decodes = [pool.add(ready(f"d{i}", Role.DECODE), 0.0) for i in range(num_decode)]
    for prefill in prefills:
        for decode in decodes:
            assert pool.set_path(path(prefill, decode))
    return pool, prefills, decodes


def test_nobody_is_chosen_from_an_empty_pool_or_without_a_decode_worker() -> None:
    assert choose(WorkerPool(NET, 2.0), LEAST) is None
    pool, _, _ = pool_of(1, 0)
    assert choose(pool, LEAST) is None
    assert pool.readiness.status == "unavailable"


def test_the_log_says_when_requests_are_served_and_when_not(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    pool, (p0,), (d0, d1) = pool_of(1, 2)
    assert [record.getMessage() for record in caplog.records] == [
        "requests are served since the KV path p0 -> d0 was tried"
    ]
    caplog.clear()
    pool.remove(d0)
    assert not caplog.records
    pool.drain(d1)
    assert caplog.messages[-1].startswith(f"no request is served since {d1} is leaving; they wait, ")
    pool.remove(d1)
    d0 = pool.add(ready("d0", Role.DECODE, epoch=2), 0.0)
    assert pool.set_path(path(p0, d0))
    assert caplog.messages[-1] == "requests are served since the KV path p0 -> d0 was tried"
    assert len(caplog.messages) == 3


def test_the_log_tells_a_degradation_once_it_has_lasted(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    now_s = 0.0
    pool = WorkerPool(NET, 2.0, lambda: now_s)
    d0 = pool.add(ready("d0", Role.DECODE), now_s)
    p0 = pool.add(ready("p0", Role.PREFILL), now_s)
    assert pool.readiness.status == "degraded", "it would answer, and has no way for blocks yet"
    now_s = SETTLING_S / 2
    assert pool.set_path(path(p0, d0)) and not pool.losses(now_s)
    assert not caplog.records, "as at every start"
    pool.remove(p0)
    for now_s in (2 * SETTLING_S, 3 * SETTLING_S):
        forgive_silence(pool, now_s)
        pool.losses(now_s)
    (told,) = caplog.messages
    assert told.startswith(f"degraded since {p0} is gone: no prefill worker serves")


def test_ready_is_who_would_answer_and_whatever_is_wrong_is_said() -> None:
    pool, (p0,), (_, d1) = pool_of(1, 2)
    assert not pool.readiness.problems
    assert pool.set_path(path(p0, d1, error="no peer access"))
    assert [(each.kind, each.text) for each in pool.readiness.problems] == [
        (Kind.KV_PATH_FAILED, "the KV path from p0 to d1 (shm) failed: no peer access")
    ]
    pool.remove(d1)
    assert pool.readiness == Readiness("ok", ()), "what was wrong with it went with it"
    pool.losses(NET.worker_timeout_s * 0.6)
    assert [each.kind for each in pool.readiness.problems] == [Kind.NO_DECODE_WORKER], "nobody is heard of"
    assert choose(pool, LEAST) is None
    forgive_silence(pool, 10.0)
    pool.losses(10.0)
    pool.drain(p0)
    assert [each.kind for each in pool.readiness.problems] == [Kind.NO_PREFILL_WORKER]
    route = choose(pool, LEAST)
    assert pool.readiness.status == "degraded" and route is not None and route.is_local


def test_whether_it_is_ready_is_whether_somebody_is_chosen() -> None:
    """By all combinations of what two workers may be, once those that have just come have met."""
    for how in itertools.product(("serving", "leaving", "silent", "absent"), repeat=2):
        for error in ("", "broken"):
            pool = WorkerPool(NET, 2.0, lambda: 2 * FIRST_PATH_S)
            members = [pool.add(ready(name, role), 0.0) for name, role in (("p", Role.PREFILL), ("d", Role.DECODE))]
            assert pool.set_path(path(members[0], members[1], error=error))
            for member, is_now in zip(members, how, strict=True):
                member.draining, member.silent = is_now == "leaving", is_now == "silent"
                if is_now == "absent":
                    pool.remove(member)
            waits_for_silent = how == ("silent", "serving") and not error  # until it speaks, or is lost
            is_chosen = choose(pool, LEAST) is not None or waits_for_silent
            assert (pool.readiness.status != "unavailable") == is_chosen, (how, error)
            assert (pool.readiness.status == "ok") == (how == ("serving", "serving") and not error), (how, error)


def test_a_standby_that_stands_in_is_a_problem_of_its_own() -> None:
    pool, _, (d0,) = pool_of(1, 1)
    pool.add(ready("d1", Role.DECODE, standby=1), 0.0)
    assert pool.readiness.status == "ok"
    pool.remove(d0)
    kinds = {each.kind: each.text for each in pool.readiness.problems}
    assert kinds[Kind.STANDBY_NEEDED] == f"decode worker d1, a standby, serves since {d0} is gone"


def test_of_many_broken_paths_some_are_told_and_all_are_counted() -> None:
    pool, prefills, decodes = pool_of(4, 4)
    for prefill in prefills:
        for decode in decodes:
            assert pool.set_path(path(prefill, decode, error="broken"))
    problems = pool.readiness.problems
    assert sum(each.num for each in problems) == 16 and len(problems) == MAX_TOLD + 1
    assert problems[-1].text == "so did 8 more KV paths"


def test_only_proven_paths_are_used() -> None:
    pool, (p0,), (d0, d1) = pool_of(1, 2)
    pool.set_path(path(p0, d0, error="broken"))
    for _ in range(5):
        route = choose(pool, LEAST)
        assert route is not None
        assert route.decode is d1
        pool.ledger.assign(route, 1)
    p0.work.outstanding_tokens = 1000
    assert choose(pool, LEAST) is None, "the proven pair has no room, and no other is used instead"


def test_decode_workers_compute_prompts_themselves_until_some_path_is_proven() -> None:
    pool, (p0,), (d0, d1) = pool_of(1, 2)
    for decode in (d0, d1):
        pool.set_path(path(p0, decode, error="broken"))
    route = choose(pool, LEAST)
    assert route is not None
    assert route.is_local
    pool.set_path(path(p0, d1))
    route = choose(pool, LEAST)
    assert route is not None
    assert (route.prefill, route.decode) == (p0, d1)


def test_prefill_by_outstanding_tokens_within_its_window_decode_by_relative_load() -> None:
    pool, (p0, p1), (d0, d1) = pool_of(2, 2)
    d1.ready = replace(d1.ready, max_num_seqs=24)
    p0.work.outstanding_tokens, p1.work.outstanding_tokens = 150, 50
    d0.work.num_assigned, d1.work.num_assigned = 4, 6  # 4/8 against 6/24
    route = choose(pool, LEAST)
    assert route is not None
    assert (route.prefill, route.decode) == (p1, d1)
    p0.work.outstanding_tokens = p1.work.outstanding_tokens = 200
    assert choose(pool, LEAST) is None
    assert pool.readiness.status != "unavailable"


def test_idle_workers_take_turns() -> None:
    pool, _, _ = pool_of(2, 2)
    chosen = []
    for _ in range(4):
        route = choose(pool, LEAST)
        assert route is not None
        pool.ledger.assign(route, 10)
        chosen.append((route.prefill.id, route.decode.id))
        route.prefill.work.outstanding_tokens -= 10
        route.decode.work.num_assigned -= 1
    assert len({prefill for prefill, _ in chosen[:2]}) == 2
    assert len({decode for _, decode in chosen[:2]}) == 2


def test_a_busy_prefill_worker_of_one_decode_worker_does_not_block_another() -> None:
    pool, (p0, p1), (d0, d1) = pool_of(2, 2)
    pool.set_path(path(p1, d0, error="no"))
    p0.work.outstanding_tokens = 1000
    d1.work.num_assigned = 5
    route = choose(pool, LEAST)
    assert route is not None
    assert (route.prefill, route.decode) == (p1, d1)


def test_local_prompts_without_a_prefill_worker_or_with_transport_none() -> None:
    pool, _, (d0,) = pool_of(0, 1)
    route = choose(pool, LEAST)
    assert route is not None
    assert route.is_local
    d0.work.num_assigned = d0.ready.max_num_seqs
    assert choose(pool, LEAST) is None
    pool, _, (d0,) = pool_of(1, 1)
    d0.ready = replace(d0.ready, transport="none")
    route = choose(pool, LEAST)
    assert route is not None
    assert route.is_local


def test_draining_workers_get_nothing() -> None:
    pool, (p0, p1), (d0, d1) = pool_of(2, 2)
    p0.draining = d1.draining = True
    route = choose(pool, LEAST)
    assert route is not None
    assert (route.prefill, route.decode) == (p1, d0)
    p1.draining = True
    route = choose(pool, LEAST)
    assert route is not None
    assert route.is_local
    d0.draining = True
    assert choose(pool, LEAST) is None


def test_who_leaves_is_told_once_whoever_says_it_first(caplog: pytest.LogCaptureFixture) -> None:
    """A prompt that it gives back may overtake its own word."""
    pool, _, (d0,) = pool_of(1, 1)
    with caplog.at_level(logging.INFO):
        pool.drain(d0)
        pool.drain(d0)
    assert caplog.text.count("is leaving; it gets nothing new") == 1


def test_silence_and_missing_steps_are_losses() -> None:
    pool, (p0,), (d0,) = pool_of(1, 1)
    assert pool.losses(2.9) == []
    assert pool.beat(heartbeat("p0", last_step_age_s=1e6), 3.0)  # idle: the age of its last step means nothing
    assert [(loss.worker, loss.stuck) for loss in pool.losses(3.5)] == [(d0, False)]
    assert pool.beat(heartbeat("d0", num_running=2, last_step_age_s=101.0), 3.5)
    assert [(loss.worker, loss.stuck) for loss in pool.losses(3.5)] == [(d0, True)]
    assert not pool.beat(heartbeat("d0", 2), 3.5)
    assert not pool.beat(heartbeat("stranger"), 3.5)
    forgive_silence(pool, 100.0)
    assert [loss.worker for loss in pool.losses(102.0)] == [d0]
    assert p0.last_seen_s == 100.0


def test_prompts_wait_for_workers_that_are_meeting_but_not_for_long() -> None:
    now_s = 100.0
    pool = WorkerPool(NET, 2.0, lambda: now_s)
    decode = pool.add(ready("d0", Role.DECODE), now_s)
    route = choose(pool, LEAST)
    assert route is not None and route.is_local, "there is nobody to meet"
    now_s += 60.0
    prefill = pool.add(ready("p0", Role.PREFILL), now_s)
    assert choose(pool, LEAST) is None
    now_s += 0.9 * FIRST_PATH_S
    assert choose(pool, LEAST) is None
    now_s += 0.2 * FIRST_PATH_S
    route = choose(pool, LEAST)
    assert route is not None and route.is_local, "they do not find together"
    decode = pool.add(ready("d1", Role.DECODE), now_s)
    assert choose(pool, LEAST) is None
    pool.set_path(path(prefill, decode, error="no way"))
    route = choose(pool, LEAST)
    assert route is not None and route.is_local, "there is nothing to wait for"
    pool.set_path(path(prefill, decode))
    route = choose(pool, LEAST)
    assert route is not None and route.workers == {prefill, decode}


def test_a_path_ends_with_either_incarnation() -> None:
    pool, (p0,), (d0,) = pool_of(1, 1)
    pool.remove(p0)
    again = pool.add(ready("p0", Role.PREFILL, epoch=2), 0.0)
    route = choose(pool, LEAST)
    assert route is not None
    assert route.is_local
    assert not list(pool.paths)
    pool.set_path(path(again, d0))
    route = choose(pool, LEAST)
    assert route is not None
    assert route.prefill is again
    pool.remove(d0)
    assert not pool.set_path(path(again, d0))
    assert not list(pool.paths)


def test_a_path_may_be_reported_before_its_prefill_worker_registers() -> None:
    pool = WorkerPool(NET, 2.0)
    decode = pool.add(ready("d0", Role.DECODE), 0.0)
    assert pool.set_path(kv_path("p0", "d0", prefill_epoch=7))
    prefill = pool.add(ready("p0", Role.PREFILL, epoch=7), 0.0)
    route = choose(pool, LEAST)
    assert route is not None
    assert (route.prefill, route.decode) == (prefill, decode)


def test_the_longest_decode_worker_limits_the_model_length() -> None:
    pool, (p0,), (d0, d1) = pool_of(1, 2)
    p0.ready = replace(p0.ready, max_model_len=10)
    d0.ready = replace(d0.ready, max_model_len=500)
    assert max_model_len(pool, 2000) == most_tokens(pool) == 1000
    assert max_model_len(pool, 900) == 900
    d1.draining = True
    assert most_tokens(pool) == 500
    assert max_model_len(WorkerPool(NET, 2.0), 900) == 900


def test_a_route_has_room_for_the_length_of_a_request() -> None:
    pool, (p0, p1), (d0, d1) = pool_of(2, 2)
    p0.ready = replace(p0.ready, max_model_len=64)
    d0.ready = replace(d0.ready, max_model_len=64)
    d1.work.num_assigned, p1.work.outstanding_tokens = 7, 150  # the others would be chosen

    def chosen(num_tokens: int, max_total_tokens: int) -> tuple[Member, Member] | None:
        route = choose(pool, Demand(num_tokens, max_total_tokens))
        return (route.prefill, route.decode) if route else None

    assert chosen(64, 64) == (p0, d0)
    assert chosen(64, 65) == (p0, d1)
    assert chosen(65, 1000) == (p1, d1)
    assert chosen(65, 1001) is None
    p1.draining = True
    assert chosen(65, 1000) == (d1, d1), "no prefill worker takes it"
    assert chosen(64, 1000) == (p0, d1)


def test_decode_by_blocks_that_are_held_or_will_be() -> None:
    pool, _, (d0, d1) = pool_of(1, 2)
    long, short = Demand(800, 1000), Demand(16, 32)
    first = choose(pool, long)
    assert first is not None and first.expected_blocks == (63,)
    pool.ledger.assign(first, 0)
    for _ in range(3):
        route = choose(pool, short)
        assert route is not None
        assert route.decode is not first.decode, "63 of 100 blocks weigh more than 3 of 8 rows"
        pool.ledger.assign(route, 0)
    pool.ledger.release(first)
    assert pool.beat(heartbeat(first.decode.id, num_running=1, num_free_blocks=(20,)), 0.0)
    route = choose(pool, short)
    assert route is not None and route.decode is not first.decode, "80 blocks are held there for whatever reason"
    assert {d0.work.expected_blocks, d1.work.expected_blocks} == {(0,), (6,)}


def test_a_worker_that_may_be_dead_gets_nothing_until_it_speaks() -> None:
    pool, (p0,), (d0,) = pool_of(1, 1)
    assert pool.losses(1.6) == []
    assert choose(pool, LEAST) is None
    assert pool.readiness.status == "unavailable"
    for worker in (p0, d0):
        assert pool.beat(heartbeat(worker.id, num_free_blocks=(100,)), 1.7)
    assert choose(pool, LEAST) is not None


def test_decode_by_the_memory_that_groups_of_blocks_divide() -> None:
    pool = WorkerPool(NET, prefill_window=2.0)
    layout = KVLayout("model", (*LAYOUT.groups, window(16, 64), state()))
    d0, d1 = (
        pool.add(ready(f"d{i}", Role.DECODE, kv_layout=layout, num_blocks=(100, 50, 10), transport=NO_TRANSPORT), 0.0)
        for i in range(2)
    )
    route = choose(pool, Demand(160, 320))
    assert route is not None and route.expected_blocks == (20, 5, 1)
    pool.ledger.assign(route, 0)
    assert decode_load(route.decode) == pytest.approx(20 / 100 + 5 / 50 + 1 / 10)
    other = d1 if route.decode is d0 else d0
    assert pool.beat(heartbeat(other.id, num_running=1, num_free_blocks=(100, 50, 5)), 0.0)
    assert decode_load(other) == 5 / 10, "five states are held there, half of the memory"
    busier = choose(pool, Demand(160, 320))
    assert busier is not None and busier.decode is route.decode
    pool.ledger.release(route)
    assert route.decode.work.expected_blocks == (0, 0, 0)
    assert pool.beat(heartbeat(other.id, num_running=1, num_free_blocks=(100,)), 0.0)
    assert decode_load(other) == 0, "what it does not say does not count"


def test_a_decode_worker_that_tells_of_unknown_prefill_workers_without_end_is_heard_no_more_of_them() -> None:
    pool, [prefill], [decode, honest] = pool_of(1, 2)
    told = [pool.set_path(kv_path(f"nobody{i}", decode.id)) for i in range(3 * MAX_WORKERS)]
    assert sum(told) == MAX_WORKERS
    assert pool.set_path(path(prefill, decode, error="broken")), "of those that are there it is"
    assert pool.set_path(kv_path("late", honest.id)), "others are"
    assert choose(pool, Demand(10, 20)) is not None


def test_a_decode_worker_that_tells_of_a_path_from_a_decode_worker_is_no_partner_and_can_leave() -> None:
    pool, [prefill], [decode, other] = pool_of(1, 2)
    for sender in (decode, other):
        assert pool.set_path(kv_path(sender.id, decode.id))
    assert pool.paths.partners(decode) == {prefill}
    pool.remove(decode)
    assert list(pool) == [prefill, other]
