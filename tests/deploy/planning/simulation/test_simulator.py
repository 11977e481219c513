"""The simulator beside what can be reckoned by hand, and beside the router's and the workers' own code."""

import random
from collections.abc import Iterable, Iterator

import pytest

import tests.scheduling.simulation as real
from common.base.errors import ConfigError
from deploy.planning.simulation.decode import LAUNCH_MS
from deploy.planning.simulation.events import Events
from deploy.planning.simulation.gpu import Gpu
from deploy.planning.simulation.layout import Layout, parse_layout
from deploy.planning.simulation.loads import Arrival, Load, Prefixes, streams
from deploy.planning.simulation.outcome import Objectives, Outcome
from deploy.planning.simulation.pool import Pool
from deploy.planning.simulation.prefill import PrefillWorker
from deploy.planning.simulation.request import Request
from deploy.planning.simulation.simulator import USUAL, Simulation, Stuck, simulate
from deploy.planning.step_times.costs import Costs
from deploy.planning.step_times.rates import Where
from router.placement.prefix_map import PoolContents
from tests.deploy.planning.made_rates import CONTEXT_MS, ROW_MS, SHAPE, STEP_MS, STEP_TOKENS, TOKEN_MS, made_rates

APART, SHARED = Layout(1, 1, 2), Layout(1, 1, 1)


def at_once(lengths: Iterable[tuple[int, ...]]) -> Load:
    return Load([Arrival(0.0, *each) for each in lengths])


def step_ms(contexts: list[int]) -> float:
    """Of a batch whose size is that of a graph."""
    return len(contexts) * ROW_MS + sum(contexts) * CONTEXT_MS


def test_a_lone_request_takes_its_steps() -> None:
    rates = made_rates(apart=Where(2.0, 3.0), copies=((1.0, 0.001), (1000.0, 1.0)))
    (request,) = simulate(APART, Costs(rates), at_once([(1000, 4)])).requests
    assert request.ttft_ms == pytest.approx(2.0 + STEP_MS + 1000 * TOKEN_MS)
    assert request.first_gap_ms == pytest.approx(1.0 + 3.0 + step_ms([1000]))
    assert request.ended_ms - request.second_ms == pytest.approx(step_ms([1001]) + step_ms([1002]))


def test_a_leap_is_as_many_steps_as_it_stands_for() -> None:
    """Two that begin together, of different lengths, step by step."""
    outcome = simulate(APART, Costs(made_rates()), at_once([(100, 300), (100, 500)]))
    time_ms, contexts = outcome.requests[0].first_ms, [100, 100]
    assert outcome.requests[1].first_ms > time_ms
    # The second one's prompt is complete while the first decodes alone: from the
    # next step that is launched then both are in each.
    alone = 0
    while time_ms - LAUNCH_MS < outcome.requests[1].first_ms:
        time_ms += step_ms([contexts[0] + alone])
        alone += 1
    contexts[0] += alone
    for _ in range(300 - 1 - alone):
        time_ms += step_ms(contexts)
        contexts = [context + 1 for context in contexts]
    assert outcome.requests[0].ended_ms == pytest.approx(time_ms)
    for _ in range(500 - 300 + alone):
        time_ms += step_ms([contexts[1]])
        contexts[1] += 1
    assert outcome.requests[1].ended_ms == pytest.approx(time_ms)
    assert sum(count for _, count in outcome.gaps) == 298 + 498, "a gap for each token but the first two"
    assert sum(ms * count for ms, count in outcome.gaps) == pytest.approx(
        sum(each.ended_ms - each.second_ms for each in outcome.requests)
    )


def test_what_is_there_already_is_not_computed_and_takes_no_room() -> None:
    rates = made_rates(found_ms_per_1000=0.5)
    arrivals = [Arrival(0.0, 20_000, 3, 19_000), Arrival(1e4, 20_000, 3)]
    known, unknown = simulate(APART, Costs(rates), Load(arrivals), kv_tokens=22_000).requests
    assert known.ttft_ms == pytest.approx(19 * 0.5 + STEP_MS + 1000 * TOKEN_MS)
    assert unknown.ttft_ms == pytest.approx(3 * STEP_MS + 20_000 * TOKEN_MS)
    assert known.tpot_ms == pytest.approx(unknown.tpot_ms), "its context is as long"
    many = at_once([(20_000, 3, 19_000)] * 12)
    assert max(each.first_gap_ms for each in simulate(APART, Costs(rates), many, kv_tokens=22_000).requests) < 100


def test_a_prefix_is_computed_once_and_others_wait_for_it() -> None:
    """Who comes with the same waits, with another one is computed; later it is found, or gone for want of room."""
    one, two = Prefixes(2, 1800).all
    sent = [(0.0, one), (0.0, two), (0.0, one), (1e4, one), (2e4, None), (3e4, one), (4e4, one)]
    load = Load([Arrival(ms, 2000 if prefix else 19_000, 2, prefix=prefix) for ms, prefix in sent])
    requests = simulate(APART, Costs(made_rates()), load, kv_tokens=20_100).requests
    assert [each.num_found for each in requests] == [0, 0, 1800, 1800, 0, 0, 1800]
    whole_ms, own_ms = STEP_MS + 2000 * TOKEN_MS, STEP_MS + 200 * TOKEN_MS
    # Steps begin with whoever is there: the first alone, then the other one, then what has waited for the first.
    first, other, waiting, later, _, again, found = (each.ttft_ms for each in requests)
    assert (first, other, waiting) == pytest.approx((whole_ms, 2 * whole_ms, 2 * whole_ms + own_ms))
    assert (later, again, found) == pytest.approx((own_ms, whole_ms, own_ms))


def test_of_two_that_could_share_a_step_one_waits_for_the_other_s_prefix() -> None:
    (one,) = Prefixes(1, 1800).all
    load = Load([Arrival(0.0, 2000, 2, prefix=prefix) for prefix in (None, None, one, one)])
    *_, first, second = simulate(APART, Costs(made_rates()), load).requests
    assert (first.num_found, second.num_found) == (0, 1800)
    assert second.ttft_ms - first.ttft_ms == pytest.approx(STEP_MS + 200 * TOKEN_MS)


def test_a_prefix_that_a_decode_worker_has_is_not_moved_there_again() -> None:
    (one,) = Prefixes(1, 1800).all
    load = Load([Arrival(1e4 * n, 2000, 2, prefix=one) for n in range(2)])
    rates = made_rates(copies=((1.0, 0.001), (1000.0, 1.0)))
    first, second = simulate(APART, Costs(rates), load).requests
    assert first.first_gap_ms - second.first_gap_ms == pytest.approx(1.8)


def test_what_travels_between_hosts_waits_for_its_links() -> None:
    """Prompts of a step each, from both prefill workers at once: their links are the decode worker's."""
    gb_per_s, bytes_of = 1e-3, SHAPE.context_bytes(1000)
    wire_ms = bytes_of / (gb_per_s * 1e6)
    layout = Layout(2, 1, 3, num_hosts=3, is_spread=True)
    assert [(place.name, place.host) for place in layout.places] == [
        ("prefill-0", 0),
        ("prefill-1", 1),
        ("decode-0", 2),
    ]
    rates = made_rates(apart=Where(0.0, 3.0))
    first, second = simulate(layout, Costs(rates), at_once([(1000, 2)] * 2), gb_per_s=gb_per_s).requests
    assert first.ttft_ms == second.ttft_ms
    gaps = sorted((first.first_gap_ms, second.first_gap_ms))
    assert gaps == pytest.approx([wire_ms + 3.0 + step_ms([1000]), 2 * wire_ms + 3.0 + step_ms([1000])])
    (lone,) = simulate(layout, Costs(rates), at_once([(STEP_TOKENS + 1000, 2)]), gb_per_s=gb_per_s).requests
    ahead_ms = SHAPE.context_bytes(STEP_TOKENS) / (gb_per_s * 1e6) - (STEP_MS + 1000 * TOKEN_MS)
    assert lone.first_gap_ms == pytest.approx(ahead_ms + wire_ms + 3.0 + step_ms([STEP_TOKENS + 1000]))


def test_a_pair_of_one_host_is_chosen_where_the_way_is_long() -> None:
    """Of two hosts, one with more prefill workers and one with more decode workers; requests come one by one."""
    layout, costs = Layout(3, 3, 6, num_hosts=2), Costs(made_rates())
    hosts = {place.name: place.host for place in layout.places}
    assert list(hosts.values()) == [0, 0, 1, 0, 1, 1]
    num_away, busy_ms = [], []
    for gb_per_s in (1.0, 1e-5):
        load = Load([Arrival(1e3 * number, 1000, 2) for number in range(12)])
        simulation = Simulation(layout, costs, load, gb_per_s=gb_per_s)
        routes = [each.route for each in simulation.run().requests]
        num_away.append(sum(hosts[route.prefill.id] != hosts[route.decode.id] for route in routes))
        busy_ms.append(sum(simulation.wires.busy_ms.values()))
        assert {route.decode.id for route in routes} == {"decode-0", "decode-1", "decode-2"}, "they take turns"
    assert num_away[0] > num_away[1] == 0 and busy_ms[0] > busy_ms[1] == 0


def test_a_host_has_its_part_of_the_workers() -> None:
    assert Layout(3, 5, 8, num_hosts=2).parts == [(2, 2), (1, 3)]
    assert Layout(3, 5, 8, num_hosts=4).parts == [(1, 1), (1, 1), (1, 1), (0, 2)]
    assert Layout(3, 5, 8, num_hosts=4, is_spread=True).parts == [(2, 0), (1, 1), (0, 2), (0, 2)]
    assert not Layout(3, 5, 8, num_hosts=4).is_shared and Layout(8, 8, 8, num_hosts=2).is_shared
    for wrong in ({"num_hosts": 3}, {"num_hosts": 2, "is_spread": True}):
        with pytest.raises(ConfigError):
            Layout(8, 8, 8, **wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="without a rate between hosts"):
        simulate(Layout(1, 1, 2, num_hosts=2), Costs(made_rates()), at_once([(10, 2)]))


def test_a_prefix_that_goes_before_its_prompt_is_admitted_is_computed() -> None:
    (one,) = Prefixes(1, 1800).all
    gpu = Gpu(Costs(made_rates()), Pool(20_000, PoolContents(("gpu0", 1), 1000)), USUAL)
    worker = PrefillWorker(gpu, gpu.costs, Events(), print, print)
    large, request = Request(0.0, 19_000, 1), Request(0.0, 2000, 1, prefix=one)
    gpu.pool.keep(one)
    gpu.pool.take(large, 18_000)
    worker.take(request)
    assert (request.num_done, request.is_started) == (1800, False)
    gpu.pool.take(large, 1000)
    assert not gpu.pool.has(one)
    gpu.give_back(large, 19_000)
    assert (request.num_found, request.is_started) == (0, True)
    assert gpu.pool.computing == {one: request}


def test_a_pool_keeps_what_is_over_until_room_is_wanted_and_a_prefix_once() -> None:
    contents, (one, two) = PoolContents(("gpu0", 1), 100), Prefixes(2, 300).all
    pool = Pool(1000, contents)
    requests = [Request(0.0, 400, 1, prefix=prefix) for prefix in (one, one, two)]
    assert not pool.has(one) and pool.wanted(requests[0], 100) == 400
    pool.take(requests[0], 100)
    assert pool.has(one) and pool.wanted(requests[1], 100) == 100
    pool.take(requests[1], 100)
    assert pool.free_tokens == 500
    for request in requests[:2]:
        pool.give_back(request, 100)
    assert pool.free_tokens == 1000 and pool.has(one) and contents.find(one.keys, 0.0).num_there == len(one.keys)
    pool.take(requests[2], 100)
    assert pool.has(one) and pool.has(two)
    pool.take(Request(0.0, 400, 1), 400)
    assert not pool.has(one) and not contents.find(one.keys, 0.0).num_there and pool.has(two)


def test_where_there_is_no_room_for_all_prefixes_each_gpu_has_others() -> None:
    """Two GPUs, each with room for half of them, know them all from the beginning; one computes half of them again."""
    prefixes = Prefixes(20, 1000).all
    arrivals = [Arrival(100.0 * n, 1100, 2, prefix=prefixes[n % 20]) for n in range(200)]
    load = Load(arrivals, known=prefixes)
    outcomes = [simulate(layout, Costs(made_rates()), load, kv_tokens=15_000) for layout in (Layout(2, 2, 2), SHARED)]
    both, alone = (sum(not request.num_found for request in outcome.requests) for outcome in outcomes)
    assert both == 0 and alone > 150


def test_of_a_prefix_that_rows_share_a_decode_step_takes_one() -> None:
    """As long as both are there; and who has another prefix shares nothing."""
    costs, known = Costs(made_rates(reread=0.0)), Prefixes(2, 900).all
    outcomes = [
        simulate(APART, costs, Load([Arrival(0.0, 1000, 300, prefix=known[n]) for n in numbers], known=known))
        for numbers in ((0, 0), (0, 1))
    ]
    both, apart = (max(each.gaps, key=lambda gap: gap[1])[0] for each in outcomes)
    assert apart - both == pytest.approx(900 * CONTEXT_MS)
    alone = [each.requests[1].ended_ms - each.requests[0].ended_ms for each in outcomes]
    assert alone[0] == pytest.approx(alone[1])


def test_steps_that_share_a_gpu_slow_each_other_down_and_nobody_alone() -> None:
    rates = made_rates()
    alone = simulate(SHARED, Costs(rates), at_once([(1000, 2)])).requests[0]
    assert alone.ttft_ms == pytest.approx(STEP_MS + 1000 * TOKEN_MS)
    streaming, late = simulate(SHARED, Costs(rates), Load([Arrival(0.0, 100, 1000), Arrival(100.0, 1000, 2)])).requests
    assert late.ttft_ms == pytest.approx(1.25 * (STEP_MS + 1000 * TOKEN_MS))
    before = simulate(SHARED, Costs(rates), at_once([(100, 1000)])).requests[0]
    # What the prompt step lasts the stream is at half its speed; then they share a step.
    assert streaming.ended_ms - before.ended_ms == pytest.approx(late.ttft_ms / 2 + step_ms([1000]), rel=0.05)


@pytest.mark.medium
def test_prompts_come_as_from_the_dispatcher_and_the_prompt_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole first tokens' times of random loads equal those of the real ones in model time, prompt by prompt."""
    monkeypatch.setattr(real, "MESSAGE_S", 0.0)
    for seed in range(6):
        rng = random.Random(seed)
        lengths = [rng.choice([rng.randint(1, 200), rng.randint(1, 3000), rng.randint(1, 40_000)]) for _ in range(150)]
        times_s = sorted(rng.uniform(0, sum(lengths) * real.TOKEN_S / rng.choice([1, 2, 0.8])) for _ in lengths)
        num_workers = rng.choice([1, 3])
        asked = [real.Asked(time_s, length) for time_s, length in zip(times_s, lengths, strict=True)]
        expected = [each.ttft_s * 1e3 for each in real.Simulation(num_workers=num_workers).run(asked)]
        load = Load([Arrival(time_s * 1e3, length, 1) for time_s, length in zip(times_s, lengths, strict=True)])
        layout = Layout(num_workers, 1, num_workers + 1)
        outcome = simulate(layout, Costs(made_rates()), load, kv_tokens=1 << 40)
        assert [each.ttft_ms for each in outcome.requests] == pytest.approx(expected), f"seed {seed}"


def draw(rng: random.Random) -> tuple[int, int]:
    """Lengths that have little in common."""
    return rng.choice([1, 50, 3000, 20_000]), rng.choice([1, 2, 30, 700])


def random_load() -> Load:
    rng, now_ms, arrivals = random.Random("s"), 0.0, []
    for _ in range(400):
        now_ms += 1e3 * rng.expovariate(60.0)
        arrivals.append(Arrival(now_ms, *draw(rng)))
    return Load(arrivals)


def _outcomes(layout: Layout, load: Load, *, kv_tokens: int = 0) -> Iterator[Outcome]:
    for _ in range(2):
        yield simulate(layout, Costs(made_rates()), load, kv_tokens=kv_tokens)


@pytest.mark.medium
@pytest.mark.parametrize("layout", [APART, SHARED, Layout(3, 2, 4), Layout(2, 2, 2)])
def test_whatever_is_sent_ends_once_and_the_same_twice(layout: Layout) -> None:
    for load in (random_load(), streams(40, [draw(random.Random(n)) for n in range(200)])):
        kv_tokens = 300_000 if layout.is_shared and layout.num_gpus > 1 else 60_000
        first, second = _outcomes(layout, load, kv_tokens=kv_tokens)
        assert len(first.requests) == len(load.arrivals)
        for one, other in zip(first.requests, second.requests, strict=True):
            assert one.arrived_ms <= one.first_ms <= one.ended_ms == other.ended_ms
            assert one.num_outputs == 1 or one.first_ms < one.second_ms <= one.ended_ms
        num_gaps = sum(max(0, each.num_outputs - 2) for each in first.requests)
        assert sum(count for _, count in first.gaps) == num_gaps


def test_pools_of_kv_are_never_overdrawn_and_empty_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    pools: list[Pool] = []
    begin, evict = Pool.__post_init__, Pool._evict

    def begun(self: Pool) -> None:
        begin(self)
        pools.append(self)

    def checked(self: Pool) -> None:
        evict(self)
        assert 0 <= self._num_kept <= self.free_tokens <= 30_000

    monkeypatch.setattr(Pool, "__post_init__", begun)
    monkeypatch.setattr(Pool, "_evict", checked)
    rng = random.Random(0)
    alike = [Arrival(0.0, 4000, 500, prefix=rng.choice(Prefixes(12, 3000).all)) for _ in range(60)]
    for layout in (APART, SHARED, Layout(3, 1, 4)):
        for load in (at_once([(4000, 500)] * 60), Load(alike)):
            simulate(layout, Costs(made_rates()), load, kv_tokens=30_000)
    assert pools and all(pool.free_tokens == 30_000 and not pool.computing for pool in pools)


def test_prompts_that_wait_for_one_another_s_pools_are_told_of() -> None:
    """Each of two GPUs is full of prompts for whoever decodes on the other."""
    with pytest.raises(Stuck, match="wait for one another's KV blocks"):
        simulate(Layout(2, 2, 2), Costs(made_rates()), random_load(), kv_tokens=30_000)


def test_a_request_longer_than_a_pool_is_refused_before_anything_runs() -> None:
    with pytest.raises(ConfigError, match=r"a request of 1100 tokens: a GPU has room for 1000 tokens"):
        simulate(APART, Costs(made_rates()), at_once([(1000, 100)]), kv_tokens=1000)


def test_figures_count_what_keeps_its_objectives() -> None:
    outcome = simulate(APART, Costs(made_rates()), at_once([(1000, 3)] * 4))
    slowest = max(each.ttft_ms for each in outcome.requests)
    assert outcome.attainment(Objectives(ttft_ms=slowest)) == 100
    assert outcome.attainment(Objectives(ttft_ms=slowest - 1)) in (25, 50, 75)
    assert outcome.figure("ttft_p99") <= slowest
    assert outcome.tokens_per_s == pytest.approx(12 / outcome.span_ms * 1e3)
    with pytest.raises(ValueError, match="figure 'x_p50'"):
        outcome.figure("x_p50")


def test_names_of_layouts() -> None:
    assert parse_layout("2P3D", 5).name == "2P3D, 5 GPUs"
    assert Layout(2, 2, 2).is_shared and not Layout(2, 2, 4).is_shared
    for text in ("2P", "P2D", "2P2Dx", "0P1D", "3P1D"):
        with pytest.raises(ConfigError):
            parse_layout(text, 2)
