"""Short prompts stay with who decodes them while prefill workers are busy for longer, one at a time."""

from typing import Any

import pytest
from msgspec.structs import replace

from common.base.errors import ErrorCode
from common.settings.config import NetSection
from common.wire.messages.memory_reports import BlockEvent
from common.wire.messages.worker import PrefillRequest, RequestFailed, Role
from common.wire.values.step_counts import StepMeter
from router.placement.capacity import layouts
from router.placement.choice import choose
from router.placement.member import Member, Speeds
from router.placement.route import LEAST, Demand, Route
from router.placement.worker_pool import WorkerPool
from tests.router.bench import Bench
from tests.router.placement.test_prefix_map import keys_of
from tests.support.messages import LAYOUT, heartbeat, kv_path, worker_ready

BLOCK = LAYOUT.groups[0].block_size
MOST = 40
TEXT = list(range(640))


class Rig:
    """A prefill worker whose steps take 100 ms, and two decode workers that compute short prompts in 10."""

    def __init__(self, *, most_tokens: int = MOST) -> None:
        self.pool = WorkerPool(NetSection(), prefill_window=2.0)
        self.prefill = self._add("p", Role.PREFILL, max_batch_tokens=1000)
        self.decodes = [self._add(f"d{n}", Role.DECODE, short_prompt_tokens=most_tokens) for n in range(2)]
        self.meter = StepMeter()
        for decode in self.decodes:
            self.pool.set_path(kv_path("p", decode.id))
            self.pool.beat(heartbeat(decode.id, num_free_blocks=(900,), short_prompt_us=10_000), 0.0)
        self.step(0.1)

    def _add(self, name: str, role: Role, **fields: Any) -> Member:
        ordinary: dict[str, Any] = {"num_blocks": (900,), "max_model_len": 10_000, "prefix_min_tokens": 64}
        ordinary["memory_server_id"] = name
        return self.pool.add(worker_ready(name, role, **ordinary | fields), 0.0)

    def step(self, seconds: float) -> None:
        """The prefill worker's steps take so long from now on."""
        self.meter.note(seconds, 1000, 1)
        self.pool.beat(heartbeat("p", num_free_blocks=(900,), steps=self.meter.counts()), 0.0)

    def know(self, decode: Member, num_tokens: int) -> None:
        """So much of the text is in a decode worker's pool."""
        contents = self.pool.prefixes.contents(decode.pool)
        contents.begin()
        contents.apply(BlockEvent.SEALED, keys_of(TEXT).keys[: num_tokens // BLOCK])

    def chosen(self, num_tokens: int = 660, **fields: Any) -> Route | None:
        token_ids = [*TEXT, *range(5000, 5000 + num_tokens)][:num_tokens]
        demand = Demand(num_tokens, num_tokens + 10, texts=(keys_of(token_ids),), **fields)
        return choose(self.pool, demand)

    def is_kept(self, num_tokens: int = 660, **fields: Any) -> bool:
        route = self.chosen(num_tokens, **fields)
        return route is not None and route.is_local


@pytest.fixture
def rig() -> Rig:
    """The prefill worker is busy, and a decode worker has the beginning of the text."""
    rig = Rig()
    rig.prefill.work.outstanding_tokens = 1000
    rig.know(rig.decodes[1], 640)
    return rig


def test_a_prompt_that_is_nearly_all_there_stays_while_prompt_steps_take_longer(rig: Rig) -> None:
    route = rig.chosen()
    assert route is not None and route.prefill is route.decode is rig.decodes[1]
    assert (route.cost.num_computed, route.most_tokens) == (20, MOST)
    assert route.reason == "decoded where it is computed: 10 ms there save 200 ms of waiting for p"
    rig.step(0.004)
    assert not rig.is_kept(), "steps are short by now"
    rig.step(0.006)
    assert rig.is_kept()
    rig.prefill.work.outstanding_tokens = 0
    assert not rig.is_kept(), "nothing is before it there"
    assert rig.is_kept(30, avoided=rig.decodes[1]) is False


def test_no_more_tokens_than_the_worker_said_and_none_of_what_it_lacks(rig: Rig) -> None:
    assert [rig.is_kept(num_tokens) for num_tokens in (640 + MOST, 641 + MOST)] == [True, False]
    rig.know(rig.decodes[1], 0)
    assert not rig.is_kept()
    assert rig.is_kept(MOST), "all of it may be computed there"
    assert not rig.is_kept(MOST + 1)
    for decode in rig.decodes:
        decode.ready = replace(decode.ready, short_prompt_tokens=0)
    assert not rig.is_kept(10)


def test_one_at_a_time_and_only_with_a_row(rig: Rig) -> None:
    first = rig.chosen()
    assert first is not None
    rig.pool.ledger.assign(first, 660)
    assert not rig.is_kept(), "its streams wait for one already"
    rig.pool.ledger.release_prompt(first, 20)
    rig.decodes[1].work.outstanding_tokens = 0
    assert rig.is_kept()
    rig.decodes[1].work.num_assigned = rig.decodes[1].ready.max_num_seqs
    assert not rig.is_kept()


def test_one_that_was_given_back_or_is_on_trial_takes_the_trip(rig: Rig) -> None:
    assert not rig.is_kept(takes_trip=True)
    assert not rig.is_kept(is_trial=True)
    for decode in rig.decodes:
        rig.pool.beat(heartbeat(decode.id, num_free_blocks=(900,)), 0.0)
    assert not rig.is_kept(), "nobody knows what it would take there"


def test_with_no_place_at_a_prefill_worker_short_ones_go_on_and_the_queue_is_not_searched(rig: Rig) -> None:
    rig.prefill.work.outstanding_tokens = 2000
    assert choose(rig.pool, LEAST) is None and rig.chosen(2000) is None
    route = rig.chosen()
    assert route is not None and "save waiting for a place" in route.reason
    rig.prefill.draining = True
    alone = rig.chosen(2000)
    assert alone is not None and alone.is_local and not alone.most_tokens, "there is nobody else to compute it"


def test_what_lies_where_is_known_for_it_in_one_pool_too() -> None:
    pool = WorkerPool(NetSection(), prefill_window=2.0)
    for name, role, most_tokens in (("p", Role.PREFILL, 0), ("d", Role.DECODE, 0)):
        fields: dict[str, Any] = {"memory_server_id": "m", "short_prompt_tokens": most_tokens, "max_batch_tokens": 100}
        member = pool.add(worker_ready(name, role, **fields), 0.0)
    assert not layouts(pool)
    member.ready = replace(member.ready, short_prompt_tokens=MOST)
    assert layouts(pool) == {LAYOUT}


def test_a_prompt_that_is_given_back_is_sent_to_a_prefill_worker_and_decoded_where_it_was() -> None:
    bench = Bench(num_prefill=1, num_decode=1)
    [prefill], [decode] = bench.prefills, bench.decodes
    decode.ready = replace(decode.ready, short_prompt_tokens=MOST)
    decode.speeds, prefill.speeds = Speeds(short_prompt_s=0.01), Speeds(step_s=0.1)
    bench.submit(num_prompt_tokens=90)
    short = bench.submit(num_prompt_tokens=MOST)
    assert bench.route(short).is_local
    failed = RequestFailed(decode.id, decode.epoch, short.spec.request_id, 0, ErrorCode.NOT_HERE, "less is here")
    bench.reports.on_failed(b"", failed)
    route = bench.route(short)
    assert (route.prefill, route.decode) == (prefill, decode)
    assert (short.failures.num_counted, short.failures.num_returns, short.attempt.number) == (0, 1, 1)
    sent = [(to, message.most_tokens) for to, message in bench.sent if isinstance(message, PrefillRequest)]
    assert sent == [(prefill.id, 0), (decode.id, MOST), (prefill.id, 0)]
