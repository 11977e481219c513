"""The pair that is chosen costs as little as the best of all pairs, each looked at."""

import math
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.settings.config import NetSection
from common.wire.messages.memory_reports import BlockEvent
from common.wire.messages.worker import Role
from router.placement.choice import choose, has_room
from router.placement.costs import Costs
from router.placement.member import NO_TRANSPORT, Member
from router.placement.pairing import Order, Pairing
from router.placement.route import Demand
from router.placement.worker_pool import WorkerPool
from tests.router.placement.test_prefix_map import keys_of
from tests.support.messages import LAYOUT, heartbeat, kv_path, worker_ready

BLOCK = LAYOUT.groups[0].block_size
TEXT = keys_of(list(range(6 * BLOCK)))
NATURAL = 2.0 ** round(math.log2(LAYOUT.groups[0].block_bytes / 1e9))
"""GB/s by which a block is copied about as fast as computed."""
RATES = {2: 100.0, 3: NATURAL, 4: NATURAL / 8, 6: 2 * NATURAL}
"""GB/s by way. Nobody has measured the fifth."""
TAKEN_AS_LONG = LAYOUT.groups[0].block_bytes / 1e9 / NATURAL
"""How long a copy of a block takes then, as a part of its computation."""


@dataclass(frozen=True)
class Worker:
    """How one is, as drawn."""

    gpu: int
    outstanding_tokens: int
    num_assigned: int
    last_turn: int
    max_model_len: int
    is_silent: bool
    is_alone: bool
    takes_replies: bool


WORKERS = st.lists(
    st.builds(
        Worker,
        gpu=st.integers(0, 2),
        outstanding_tokens=st.sampled_from([0, 0, 10, 96, 100, 200, 5000]),
        num_assigned=st.integers(0, 8),
        last_turn=st.integers(0, 3),
        max_model_len=st.sampled_from([1000, 1000, 1000, 101]),
        is_silent=st.sampled_from([False, False, False, True]),
        is_alone=st.sampled_from([False] * 9 + [True]),
        takes_replies=st.booleans(),
    ),
    max_size=5,
)


def pool_of(prefills: list[Worker], decodes: list[Worker], ways: list[int], known: list[list[int]]) -> WorkerPool:
    """Ways between them: 0 was not tried, 1 failed, others are of `RATES`; known: blocks of the text."""
    pool = WorkerPool(NetSection(), prefill_window=2.0, clock=lambda: 1000.0)
    for role, drawn in ((Role.PREFILL, prefills), (Role.DECODE, decodes)):
        for number, worker in enumerate(drawn):
            ready = worker_ready(
                f"{role.name}{number}", role, num_blocks=(100,), max_model_len=worker.max_model_len, max_num_seqs=8,
                max_batch_tokens=100 if role is Role.PREFILL else 0, memory_server_id=f"m{worker.gpu}",
                memory_server_epoch=1, pool_id=1, takes_replies=worker.takes_replies and role is Role.PREFILL,
                transport=NO_TRANSPORT if worker.is_alone and role is Role.DECODE else "host",
            )  # fmt: skip
            member = pool.add(ready, 0.0)
            member.work.outstanding_tokens = worker.outstanding_tokens if role is Role.PREFILL else 0
            pool.beat(
                heartbeat(member.id, num_free_blocks=(100,), prompt_block_us=1_000_000), 0.0
            )  # so it takes replies
            member.work.num_outstanding, member.silent = 1, worker.is_silent
            member.work.num_assigned, member.last_turn = worker.num_assigned, worker.last_turn
    pairs = [(p, d) for p in range(len(prefills)) for d in range(len(decodes)) if not decodes[d].is_alone]
    for (p, d), way in zip(pairs, ways, strict=False):
        if way:
            error = "broken" if way == 1 else ""
            pool.set_path(kv_path(f"PREFILL{p}", f"DECODE{d}", error=error, gb_per_s=RATES.get(way, 0.0)))
    for gpu, blocks in enumerate(known):
        if any(member.pool == (f"m{gpu}", 1) for member in pool):
            contents = pool.prefixes.contents((f"m{gpu}", 1))
            contents.begin()
            contents.apply(BlockEvent.SEALED, [TEXT.keys[number] for number in blocks])
    return pool


@dataclass
class Exhaustive:
    """All pairs that take a request, by the rules alone."""

    pool: WorkerPool
    demand: Demand
    overtakes: bool

    def __post_init__(self) -> None:
        self.costs = Costs(self.demand, self.pool)
        self.proven = {(path.prefill_worker_id, path.worker_id) for path in self.pool.paths if not path.error}
        self.usable = [pair for pair in self._pairs() if self._is_open(pair[0])]
        self.pairs = [
            pair for pair in self.usable if has_room(self.pool, pair[0], self.demand, overtakes=self.overtakes)
        ]

    def _pairs(self) -> list[tuple[Member, Member]]:
        demand, members = self.demand, list(self.pool)
        prefills = [m for m in members if m.ready.role is Role.PREFILL and demand.num_tokens <= m.ready.max_model_len]
        decodes = [
            m for m in members if m.ready.role is Role.DECODE and demand.max_total_tokens <= m.ready.max_model_len
        ]
        decodes = [decode for decode in decodes if self._is_open(decode)]
        handed = [(p, d) for p in prefills for d in decodes if (p.id, d.id) in self.proven]
        return [
            *(pair for pair in handed if pair[1].ready.transport != NO_TRANSPORT),
            *((d, d) for d in decodes if d.ready.transport == NO_TRANSPORT or not handed),
        ]

    def _is_open(self, worker: Member) -> bool:
        return not worker.silent

    def order(self, pair: tuple[Member, Member]) -> tuple[bool, bool, float, int, int]:
        prefill, decode = pair
        avoided = self.demand.avoided
        return decode is avoided, prefill is avoided, self.costs.of(pair).total, decode.last_turn, prefill.last_turn

    def most_elsewhere(self, prefill: Member) -> int:
        """Tokens of the text in the pool of some decode worker that it takes replies from."""
        owners = [m for m in self.pool if (prefill.id, m.id) in self.proven and m.pool != prefill.pool]
        keys = TEXT.keys[: (self.demand.num_tokens - 1) // BLOCK]
        found = [self.pool.prefixes.find(owner.pool, keys) for owner in owners]
        return max((each.num_there * BLOCK for each in found), default=0) if prefill.ready.takes_replies else 0


@pytest.mark.slow
@given(
    prefills=WORKERS,
    decodes=WORKERS,
    ways=st.one_of(st.just([2] * 25), st.lists(st.integers(0, 5), min_size=25, max_size=25)),
    known=st.lists(st.lists(st.integers(0, 5), max_size=6), min_size=3, max_size=3),
    avoided=st.integers(0, 30),
    overtakes=st.booleans(),
    has_text=st.booleans(),
)
@settings(max_examples=500)
def test_it_is_the_best_of_all_pairs(
    prefills: list[Worker],
    decodes: list[Worker],
    ways: list[int],
    known: list[list[int]],
    avoided: int,
    overtakes: bool,
    has_text: bool,
) -> None:
    pool = pool_of(prefills, decodes, ways, known)
    members = dict(enumerate(pool))
    demand = Demand(6 * BLOCK, 6 * BLOCK + 5, members.get(avoided), texts=(TEXT,) if has_text else ())
    every = Exhaustive(pool, demand, overtakes)
    route = choose(pool, demand, overtakes=overtakes)
    assert (route is None) == (not every.pairs)
    if route is not None:
        assert route.cost == every.costs.of((route.prefill, route.decode))
        assert every.order((route.prefill, route.decode)) == pytest.approx(min(map(every.order, every.pairs)))
        assert route.num_pairs == len(every.pairs)
        least = min(every.costs.of(pair).num_computed for pair in every.usable)
        assert route.num_wasted == route.cost.num_computed - least
        if has_text and not route.is_local:
            assert route.cost.num_known + route.cost.num_taken == max(
                route.cost.num_known, every.most_elsewhere(route.prefill)
            )


def test_of_many_workers_few_pairs_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """As streams wait for each choice."""
    looked_at = 0

    def order(self: Pairing, prefill: Member, decode: Member, cost: float) -> Order:
        nonlocal looked_at
        looked_at += 1
        return of(self, prefill, decode, cost)

    of = Pairing._order
    monkeypatch.setattr(Pairing, "_order", order)
    one = Worker(0, 0, 0, 0, 1000, is_silent=False, is_alone=False, takes_replies=True)
    workers = [replace(one, gpu=number % 5, last_turn=number) for number in range(30)]
    for ways in ([2] * 900, [2 if p // 5 == d // 5 else 4 for p in range(30) for d in range(30)]):
        looked_at = 0
        pool = pool_of(workers, workers, ways, [[0, 1], [], [], [], []])
        route = choose(pool, Demand(6 * BLOCK, 6 * BLOCK + 5, texts=(TEXT,)))
        assert route is not None and route.num_pairs == 900 and looked_at <= (1 + len(set(ways))) * 30


def test_what_lies_on_another_host_costs_the_time_of_its_bytes() -> None:
    """So a decode worker there is chosen only if one here is fuller than the bytes' way takes."""
    one = Worker(0, 0, 0, 0, 1000, is_silent=False, is_alone=False, takes_replies=True)
    prefills, decodes = [replace(one, gpu=gpu) for gpu in (0, 2)], [replace(one, gpu=gpu) for gpu in (1, 2)]
    near, far = 2, 4
    demand = Demand(6 * BLOCK, 6 * BLOCK + 5, texts=(TEXT,))
    for num_assigned, chosen in ((0, "DECODE1"), (1, "DECODE0")):
        # PREFILL1 has no room: its decode worker is the other host's for PREFILL0.
        drawn = [prefills[0], replace(prefills[1], outstanding_tokens=5000)]
        pool = pool_of(drawn, [decodes[0], replace(decodes[1], num_assigned=num_assigned)], [far, near, far, near], [])
        route = choose(pool, demand)
        assert route is not None and (route.prefill.id, route.decode.id) == ("PREFILL0", chosen)
    assert route is not None and route.cost.num_moved == 6 * BLOCK
    assert route.cost.moving == pytest.approx(8 * TAKEN_AS_LONG * 6 * BLOCK), "eight times as long as computing"
    # What is in the pool there already is not moved.
    known = [[], [0, 1, 2, 3, 4, 5], []]
    pool = pool_of(prefills[:1], [decodes[0], replace(decodes[1], num_assigned=4)], [far, far], known)
    route = choose(pool, demand)
    assert route is not None and (route.decode.id, route.cost.num_moved, route.cost.moving) == ("DECODE0", 0, 0.0)


def test_of_two_holders_the_one_is_named_from_which_taking_saves_more() -> None:
    one = Worker(0, 0, 0, 0, 1000, is_silent=False, is_alone=False, takes_replies=True)
    decodes = [replace(one, gpu=gpu) for gpu in (1, 2)]
    known, demand = [[], [0, 1, 2, 3, 4], [0, 1, 2, 3]], Demand(6 * BLOCK, 6 * BLOCK + 5, texts=(TEXT,))
    for ways, holder, num_taken in (([2, 2], "DECODE0", 5), ([3, 2], "DECODE1", 4), ([2, 4], "DECODE0", 5)):
        route = choose(pool_of([one], decodes, ways, known), demand)
        assert route is not None and route.holder is not None
        assert (route.holder.id, route.cost.num_taken) == (holder, num_taken * BLOCK)


def test_a_prefix_of_another_host_saves_its_computation_less_the_time_of_its_bytes() -> None:
    one = Worker(0, 0, 0, 0, 1000, is_silent=False, is_alone=False, takes_replies=True)
    demand, known = Demand(6 * BLOCK, 6 * BLOCK + 5, texts=(TEXT,)), [[], [0, 1, 2, 3], []]
    for way, num_taken, time in ((2, 4, 1 / 4), (6, 4, TAKEN_AS_LONG / 2), (4, 0, 0.0)):
        pool = pool_of([one], [replace(one, gpu=1), replace(one, gpu=0, num_assigned=7)], [way, 2], known)
        prefill, _, decode = pool
        cost = Costs(demand, pool).of((prefill, decode))
        assert (cost.num_taken, cost.num_computed) == (num_taken * BLOCK, (6 - num_taken) * BLOCK)
        assert cost.moving == pytest.approx(num_taken * BLOCK * time) and prefill.pool == decode.pool
