"""What is known to lie where; and prompts go there, unless they would wait for longer than that saves."""

import math
import tracemalloc
from array import array
from collections import Counter
from secrets import randbits

import pytest
from msgspec.structs import replace

from common.settings.config import NetSection
from common.wire.messages.memory_reports import BlockEvent
from common.wire.messages.worker import Role
from common.wire.values.block_key import digests, root_of, short_keys, short_keys_in_group
from common.wire.values.kv_layout import KVLayout
from common.wire.values.packing import pack_ids
from router.placement.capacity import layouts
from router.placement.choice import choose
from router.placement.member import Member, Speeds
from router.placement.predictions import MOMENT_S
from router.placement.prefix_map import NOTHING, PoolContents, PrefixMap
from router.placement.route import Demand, Route
from router.placement.text_keys import TextKeys
from router.placement.text_places import AT_ONCE
from router.placement.worker_pool import WorkerPool
from tests.support.layouts import full, state, window
from tests.support.messages import LAYOUT, kv_path, worker_ready

BLOCK = LAYOUT.groups[0].block_size
SLOW = Speeds(block_us=1_000_000)
"""Of who computes a block in a second: everything is better taken from elsewhere."""
HERE, THERE = ("memory-0", 1), ("memory-1", 1)
OLD, NEW, NEWEST = range(4), range(10, 14), range(20, 24)


class Known:
    """A map of two pools of six blocks, with a clock moved by hand."""

    def __init__(self, *, is_reported: bool) -> None:
        self.now_s = 100.0
        self.map = PrefixMap(lambda: self.now_s)
        for pool in (HERE, THERE):
            self.map.add(pool, 6)
            if is_reported:
                self.map.contents(pool).begin()
        self.here = self.map.contents(HERE)

    def count(self, keys: range | list[int]) -> int:
        """What a text is taken to begin with here; elsewhere nothing ever is."""
        assert self.map.find(THERE, keys).num_there == 0
        return self.map.find(HERE, keys).num_there


@pytest.fixture
def told() -> Known:
    return Known(is_reported=True)


@pytest.fixture
def untold() -> Known:
    return Known(is_reported=False)


def test_what_was_told_of_is_there_until_it_is_evicted(told: Known) -> None:
    told.here.apply(BlockEvent.SEALED, OLD)
    assert (told.count(OLD), told.count([0, 11, 1])) == (4, 1)
    told.now_s += 1e6
    assert told.count(OLD) == 4
    told.here.apply(BlockEvent.GONE, [2, 99])
    assert told.count(OLD) == 2, "without it the rest is not found"
    told.here.begin()
    assert told.count(OLD) == 0, "it is told anew"


def test_a_prediction_holds_until_word_comes_or_its_request_has_been_over_for_a_moment(told: Known) -> None:
    prediction = told.map.predict(HERE, OLD)
    told.now_s += 1e6
    assert told.count(OLD) == 4
    told.here.apply(BlockEvent.SEALED, OLD[:2])
    told.map.end(prediction)
    told.now_s += 0.9 * MOMENT_S
    assert told.count(OLD) == 4
    told.now_s += 0.2 * MOMENT_S
    assert told.count(OLD) == 2, "no word came of the others"
    told.here.apply(BlockEvent.GONE, OLD)
    assert told.count(OLD) == 0


def test_what_two_requests_leave_there_is_the_later_one_s(told: Known) -> None:
    first, second = told.map.predict(HERE, OLD), told.map.predict(HERE, [0, 1, 7])
    told.map.end(first)
    told.now_s += 2 * MOMENT_S
    assert (told.count(OLD), told.count([0, 1, 7])) == (2, 3)
    told.map.end(second)
    told.now_s += 2 * MOMENT_S
    assert told.count([0, 1, 7]) == 0


def test_where_nobody_tells_it_is_there_until_as_much_else_was_sent_there(untold: Known) -> None:
    for keys in (OLD, [0, 1]):
        untold.map.end(untold.map.predict(HERE, keys))
    untold.now_s += 1e6
    assert untold.count(OLD) == 4
    untold.map.end(untold.map.predict(HERE, NEW))
    assert (untold.count(NEW), untold.count(OLD)) == (4, 2), "what was sent twice is younger"
    untold.map.end(untold.map.predict(HERE, NEWEST))
    assert (untold.count(NEWEST), untold.count(NEW), untold.count(OLD)) == (4, 0, 0), "what goes, goes whole"
    untold.map.end(untold.map.predict(HERE, range(100, 107)))
    assert untold.count(range(100, 107)) == 0, "which does not fit at all"


def test_once_a_server_tells_only_what_runs_is_predicted_and_without_it_predictions_stay(untold: Known) -> None:
    untold.map.end(untold.map.predict(HERE, OLD))
    running = untold.map.predict(HERE, NEW[:2])
    untold.here.begin()
    assert (untold.count(OLD), untold.count(NEW)) == (0, 2)
    untold.here.apply(BlockEvent.SEALED, OLD)
    untold.here.forget_reports()
    untold.map.end(running)
    untold.now_s += 1e6
    assert (untold.count(OLD), untold.count(NEW)) == (0, 2)


def test_of_a_pool_that_nobody_has_nothing_is_known(told: Known) -> None:
    told.here.apply(BlockEvent.SEALED, OLD)
    prediction = told.map.predict(HERE, NEW)
    told.map.keep({THERE})
    assert told.map.find(HERE, OLD).num_there == 0
    told.map.end(prediction)
    told.map.end(told.map.predict(HERE, NEW))
    told.map.add(HERE, 6)
    assert told.map.find(HERE, OLD).num_there == told.map.find(HERE, NEW).num_there == 0


def test_what_was_sent_again_and_again_takes_no_more_room(told: Known, untold: Known) -> None:
    for known in (told, untold):
        for number in range(1000):
            known.map.end(known.map.predict(HERE, [1, 2, number]))
            known.now_s += MOMENT_S / 10
            known.count([1])
        predictions = known.here._predictions
        assert len(predictions._all) <= 11 and len(predictions.latest) <= 13


def test_a_block_takes_about_a_hundred_bytes() -> None:
    keys = [array("Q", [randbits(64) for _ in range(4096)]) for _ in range(12)]
    contents = PoolContents(HERE, 50_000)
    tracemalloc.start()
    try:
        for some in keys:
            contents.apply(BlockEvent.SEALED, some)
        num_bytes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert num_bytes / len(contents.reported) < 110


# --- keys of texts ----------------------------------------------------------------------------------


def keys_of(token_ids: list[int], layout: KVLayout = LAYOUT, salt: bytes = b"") -> TextKeys:
    text = TextKeys.of(layout, salt)
    text.grow(token_ids)
    return text


def test_keys_are_those_that_workers_seal_under_however_a_text_is_cut() -> None:
    token_ids = list(range(5 * BLOCK + 7))
    expected = short_keys(digests(root_of(LAYOUT, b"salt"), pack_ids(token_ids), BLOCK))
    assert len(expected) == 5
    whole = keys_of(token_ids, salt=b"salt")
    assert (whole.keys, whole.num_tokens) == (expected, 5 * BLOCK)
    parts = keys_of(token_ids[: 2 * BLOCK], salt=b"salt")
    longer = parts.grown(token_ids[parts.num_tokens :])
    assert longer.keys == expected and parts.keys == expected[:2]
    assert not set(keys_of(token_ids).keys) & set(expected)


# --- where prompts go -------------------------------------------------------------------------------


class Pools:
    """Two GPUs, a prefill and a decode worker on each, that share a pool; nobody tells of blocks."""

    def __init__(self) -> None:
        self.workers = WorkerPool(NetSection(), prefill_window=100.0)
        self.members = [self._member(f"{role.name}-{n}", role, n) for n in range(2) for role in Role]
        for n in range(2):
            for m in range(2):
                assert self.workers.set_path(kv_path(f"PREFILL-{n}", f"DECODE-{m}"))

    def _member(self, name: str, role: Role, gpu: int) -> Member:
        ready = worker_ready(
            name, role, device=f"cuda:{gpu} GPU-{gpu}", num_blocks=(10_000,), max_model_len=100_000,
            max_batch_tokens=8192, max_num_seqs=64, memory_server_id=f"memory-{gpu}", memory_server_epoch=1,
            pool_id=gpu, prefix_min_tokens=256,
        )  # fmt: skip
        return self.workers.add(ready, 0.0)

    def contents(self, gpu: int) -> PoolContents:
        return self.workers.prefixes.contents((f"memory-{gpu}", gpu))

    def send(self, token_ids: list[int]) -> Route:
        demand = self.demand(token_ids)
        route = choose(self.workers, demand)
        assert route is not None
        self.workers.ledger.assign(route, len(token_ids))
        for pool in {route.prefill.pool, route.decode.pool}:
            self.workers.prefixes.predict(pool, demand.texts[0].keys)
        return route

    def chosen(self, token_ids: list[int]) -> Route:
        route = choose(self.workers, self.demand(token_ids))
        assert route is not None
        return route

    def demand(self, token_ids: list[int]) -> Demand:
        return Demand(len(token_ids), len(token_ids) + 100, texts=(keys_of(token_ids),))

    def over(self, route: Route, num_tokens: int) -> None:
        self.workers.ledger.release_prompt(route, num_tokens)
        self.workers.ledger.release(route)


def test_a_conversation_stays_where_it_was_and_is_decoded_in_the_same_pool() -> None:
    pools, histories = Pools(), [list(range(first, first + 2000)) for first in (0, 10_000, 20_000, 30_000)]
    assert layouts(pools.workers) == {LAYOUT}
    first = [pools.send(history) for history in histories]
    assert Counter(route.prefill.id for route in first) == {"PREFILL-0": 2, "PREFILL-1": 2}
    assert all(route.prefill.pool == route.decode.pool for route in first)
    for route in first:
        pools.over(route, 2000)
    for history, before in [*zip(histories, first, strict=True)][::-1]:
        route = pools.send([*history, *range(300)])
        assert (route.prefill, route.decode) == (before.prefill, before.decode)
        assert route.cost.num_known == 2000 // BLOCK * BLOCK


def test_one_beginning_that_all_share_does_not_draw_all_to_one_place() -> None:
    pools, shared = Pools(), list(range(4096))
    routes = [pools.send([*shared, *range(100 * number, 100 * number + 256)]) for number in range(1, 41)]
    shares = Counter(route.prefill.id for route in routes)
    assert min(shares.values()) >= 18 and len(shares) == 2
    assert sum(route.cost.num_known == 4096 for route in routes) >= 38, "each computes it once"


def test_what_has_a_long_queue_is_left_for_one_that_has_none() -> None:
    pools, text = Pools(), list(range(1024))
    first = pools.send(text)
    pools.over(first, 1024)
    first.prefill.work.outstanding_tokens = 5000
    route = pools.send([*text, 1])
    assert route.prefill is not first.prefill and route.cost.num_known == 0


def test_where_two_pools_have_the_same_the_load_decides() -> None:
    pools, text = Pools(), list(range(4096))
    for gpu in range(2):
        pools.contents(gpu).begin()
        pools.contents(gpu).apply(BlockEvent.SEALED, keys_of(text).keys)
    busy = pools.chosen([*text, 1])
    busy.prefill.work.outstanding_tokens = 100
    route = pools.chosen([*text, 1])
    assert route.prefill is not busy.prefill and route.decode.gpu == route.prefill.gpu
    assert (route.cost.num_known, route.cost.num_computed, route.cost.num_moved, route.num_pairs) == (4096, 1, 0, 4)


def test_who_decodes_elsewhere_moves_what_that_pool_lacks() -> None:
    pools, text = Pools(), list(range(4096))
    prefill, decode = pools.members[0], pools.members[3]
    assert (prefill.id, decode.id) == ("PREFILL-0", "DECODE-1")
    prefill.speeds = SLOW
    for gpu, num_blocks in ((0, 200), (1, 256)):
        pools.contents(gpu).begin()
        pools.contents(gpu).apply(BlockEvent.SEALED, keys_of(text).keys[:num_blocks])
    pools.members[1].work.num_assigned = 64  # DECODE-0 is full
    pools.members[2].work.outstanding_tokens = 2000  # PREFILL-1
    route = pools.chosen([*text, 1])
    assert (route.prefill, route.decode) == (prefill, decode)
    assert (route.cost.num_known, route.cost.num_taken, route.cost.num_moved) == (200 * BLOCK, 56 * BLOCK, 897)
    assert route.cost.num_handed_over == 1, "of which the decode worker is told that it has all others"
    assert str(route) == (
        "PREFILL-0 -> DECODE-1, 896 tokens taken from DECODE-1, "
        "the best of 4: 1 to compute behind 0, 897 to move, decode 0% full"
    )


def test_a_reply_is_taken_from_who_decoded_it_where_blocks_travel() -> None:
    pools, text = Pools(), list(range(1024))
    p0, d0, p1, d1 = pools.members
    for gpu, num_blocks in ((0, 40), (1, 64)):
        pools.contents(gpu).begin()
        pools.contents(gpu).apply(BlockEvent.SEALED, keys_of(text).keys[:num_blocks])
    d1.work.num_assigned, p1.draining, p0.speeds = 64, True, SLOW
    route = pools.chosen([*text, *range(5000, 5100)])
    assert (route.prefill, route.decode, route.holder) == (p0, d0, d1)
    assert (route.cost.num_known, route.cost.num_taken, route.cost.num_computed) == (640, 384, 100)
    pools.contents(0).apply(BlockEvent.SEALED, keys_of(text).keys)
    assert pools.chosen([*text, 1]).holder is None, "it is here by now"
    pools.contents(0).apply(BlockEvent.GONE, keys_of(text).keys)
    pools.workers.set_path(kv_path("PREFILL-0", "DECODE-1", error="broken"))
    assert pools.chosen([*text, 1]).holder is None, "nothing travels"
    assert pools.chosen(list(range(200))).holder is None, "short prompts are not looked up"
    p0.ready = replace(p0.ready, prefix_min_tokens=1 << 20)
    pools.workers.set_path(kv_path("PREFILL-0", "DECODE-1"))
    assert pools.chosen([*text, 1]).cost.num_taken == 0
    p0.ready = replace(p0.ready, prefix_min_tokens=256)
    assert pools.chosen([*text, 1]).holder is d1
    p0.ready = replace(p0.ready, takes_replies=False)
    route = pools.chosen([*text, 1])
    assert (route.holder, route.cost.num_taken, route.cost.num_computed) == (None, 0, 1025)


def test_a_reply_counts_as_taken_where_its_way_is_shorter_than_its_computation() -> None:
    """As the prefill worker sees it, by what it tells: else what is expected to be there is too much."""
    pools, text = Pools(), list(range(1024))
    p0, _, p1, d1 = pools.members
    for gpu in range(2):
        pools.contents(gpu).begin()
    pools.contents(1).apply(BlockEvent.SEALED, keys_of(text).keys)
    d1.work.num_assigned, p1.draining = 64, True

    def expected(block_us: int, taking_us: int, gb_per_s: float) -> int:
        pools.workers.set_path(kv_path("PREFILL-0", "DECODE-1", gb_per_s=gb_per_s))
        p0.speeds = Speeds(block_us=block_us, taking_us=taking_us)
        route = pools.chosen([*text, 1])
        assert route.holder is d1, "it is for the prefill worker to say"
        assert route.cost.num_computed == 1025 - route.cost.num_expected
        assert ("taken from" in str(route)) == bool(route.cost.num_taken)
        return route.cost.num_expected

    block_us = LAYOUT.groups[0].block_bytes / 1e3  # what the copy of one takes at 1 GB/s
    assert expected(math.ceil(2 * block_us), 0, 1.0) == 1024
    assert expected(math.ceil(2 * block_us), 0, 0.25) == 0, "the way is slow"
    assert expected(160, 1000, 1000.0) == 1024 and expected(160, 64 * 160, 1000.0) == 0, "it takes long to have it come"
    assert expected(0, 0, 1.0) == 0, "nobody knows how long computing takes"
    assert expected(160, 0, 0.0) == 0, "nobody has seen how fast blocks travel"


def test_what_is_in_host_memory_draws_a_prompt_if_to_restore_it_is_cheaper() -> None:
    pools, text = Pools(), list(range(4096))
    p0, d0, p1, _ = pools.members
    for gpu in range(2):
        pools.contents(gpu).begin()
    contents, keys = pools.contents(0), keys_of(text).keys
    contents.apply(BlockEvent.SEALED, keys[:6])
    contents.apply(BlockEvent.PARKED, keys[6:])
    p0.work.outstanding_tokens = 100
    assert pools.chosen([*text, 1]).prefill is p1, "nobody knows how long computing takes"
    p0.speeds = Speeds(block_us=160)  # 10 us a token
    contents.copy_us = 40
    route = pools.chosen([*text, 1])
    assert (route.prefill, route.decode) == (p0, d0)
    assert (route.cost.num_known, route.cost.num_restored, route.cost.num_computed) == (96, 4000, 1)
    assert route.cost.restoring == pytest.approx((1000 + 250 * 40) / 10) and route.cost.num_expected == 4096
    assert "1 to compute behind 100, 4000 to restore, 0 to move" in str(route)
    p0.work.outstanding_tokens = 3000  # 1,100 tokens could be computed meanwhile
    assert pools.chosen([*text, 1]).prefill is p1, "others wait there for longer than that saves"
    p0.work.outstanding_tokens = 100
    contents.copy_us = 159
    assert pools.chosen([*text, 1]).prefill is p1, "copying takes as long as computing"
    contents.copy_us = 40
    assert pools.chosen(text[:215]).cost.num_restored == 0, "of so little not much is saved"
    contents.apply(BlockEvent.GONE, keys[100:101])
    assert pools.chosen([*text, 1]).cost.num_restored == 94 * BLOCK


def test_what_can_be_restored_is_not_taken_from_elsewhere() -> None:
    pools, text = Pools(), list(range(4096))
    p0, d0, p1, d1 = pools.members
    for gpu in range(2):
        pools.contents(gpu).begin()
    keys = keys_of(text).keys
    pools.contents(0).apply(BlockEvent.PARKED, keys[:200])
    pools.contents(0).copy_us = 1
    p0.speeds, p1.draining = Speeds(block_us=100_000), True
    d1.work.num_assigned = 64
    pools.contents(1).apply(BlockEvent.SEALED, keys[:200])
    route = pools.chosen([*text, 1])
    assert (route.holder, route.cost.num_restored, route.cost.num_taken) == (None, 3200, 0)
    pools.contents(1).apply(BlockEvent.SEALED, keys[200:])
    route = pools.chosen([*text, 1])
    assert (route.holder, route.cost.num_restored, route.cost.num_taken) == (d1, 3200, 896)
    assert (route.cost.num_computed, route.cost.num_moved) == (1, 896) and route.decode is d0


def test_what_is_not_looked_up_or_is_of_another_layout_is_not_expected() -> None:
    pools = Pools()
    for gpu in range(2):
        pools.contents(gpu).begin()
        pools.contents(gpu).apply(BlockEvent.SEALED, keys_of(list(range(256))).keys)
    for num_tokens, num_known in ((255, 0), (256, 240), (257, 256), (300, 256)):
        assert pools.chosen(list(range(num_tokens))).cost.num_known == num_known
    other = Demand(300, 400, texts=(keys_of(list(range(300)), KVLayout("other", LAYOUT.groups)),))
    route = choose(pools.workers, other)
    assert route is not None and route.cost.num_known == 0


def test_a_text_of_several_groups_is_known_as_far_as_it_can_be_resumed() -> None:
    layout = KVLayout("m", (full(1, 1, 1, 4, "float32"), window(4, 6), state(2)))
    now_s, keys = [0.0], array("Q", range(100, 110))
    known = PrefixMap(lambda: now_s[0])
    known.add(HERE, 60, layout)
    contents = known.contents(HERE)
    contents.begin()

    def seal(group: int, *places: int) -> None:
        of_group = short_keys_in_group(array("Q", [keys[place] for place in places]), group)
        contents.apply(BlockEvent.SEALED, of_group)

    seal(0, *range(9))
    assert known.find(HERE, keys)[::4] == (0, 9)
    seal(2, 4, 7)
    seal(1, *range(5))
    assert known.find(HERE, keys)[::4] == (5, 9)
    seal(1, 6, 7)
    assert known.find(HERE, keys)[::4] == (8, 9) and known.find(HERE, keys, most=7).num_there == 5
    without = known.predict(HERE, keys)
    assert known.find(HERE, keys).num_there == 8 and len(without.keys) == 1 + 2, "no state is expected"
    known.end(without)
    prediction = known.predict(HERE, keys, has_states=True)
    assert known.find(HERE, keys).num_there == 10
    known.end(prediction)
    now_s[0] += 2 * MOMENT_S
    contents.copy_us = 10
    contents.apply(BlockEvent.PARKED, short_keys_in_group(keys[9:], 0))
    for group in (1, 2):
        contents.apply(BlockEvent.PARKED, short_keys_in_group(keys[8:], group))
    num_slots = 1 + 2 + 1 * -(-layout.groups[2].block_bytes // min(each.block_bytes for each in layout.groups))
    assert known.find(HERE, keys)[:3] == (8, 2, 2) and known.find(HERE, keys).copy_us >= 5 * num_slots


class Counted(set[int]):
    """Blocks that count how many are looked for."""

    num_asked = 0

    def __contains__(self, key: object) -> bool:
        self.num_asked += 1
        return super().__contains__(key)


def test_a_long_text_that_is_nowhere_costs_next_to_nothing() -> None:
    layout = KVLayout("m", (state(2), window(4, 6), full(1, 1, 1, 4, "float32")))
    contents, keys = PoolContents(HERE, 60, layout), array("Q", range(100, 20_000))
    contents.begin()
    contents.reported, contents.parked = Counted(), Counted([1])
    assert contents.find(keys, 0.0) == NOTHING
    assert contents.reported.num_asked + contents.parked.num_asked <= 3 * AT_ONCE
