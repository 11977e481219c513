"""Who is in reserve follows from who is there, after any deaths; and streams go on with who was."""

import asyncio
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.wire.messages.memory import KVOffer
from common.wire.messages.worker import KVPathReport, PrefillRequest, Role, WorkerLeaving
from router.dispatch.incidents import Incidents
from router.observe.health import report
from router.placement.capacity import max_model_len, most_tokens
from router.placement.choice import choose
from router.placement.member import Member
from router.placement.route import LEAST, Demand
from router.placement.worker_pool import WorkerPool
from router.workers.role_changes import RoleChanges
from tests.router.conftest import Client, Cluster, StartCluster
from tests.router.placement.test_worker_pool import NET, ready
from tests.support.fakes import FakeDecode
from tests.support.messages import heartbeat, kv_path

STANDBYS = {"s0": 1, "s1": 1, "s2": 2}
"""Of each for how many others: the last keeps two serving, the second is there for the death of the first."""
ORDINARY = ("d0", "d1")


class Crew:
    """A pool with one prefill worker, whose paths to decode workers are proven as these join."""

    def __init__(self, *decodes: str, prefill: bool = True) -> None:
        self.now_s = 0.0
        self.pool = WorkerPool(NET, 2.0, lambda: self.now_s)
        self._num_starts = 0
        self.prefills = [self.pool.add(ready("p0", Role.PREFILL), 0.0)] if prefill else []
        for name in decodes:
            self.start(name)

    def start(self, name: str, *, proven: bool = True, **fields: Any) -> Member:
        self._num_starts += 1
        fields.setdefault("standby", STANDBYS.get(name, 0))
        worker = self.pool.add(ready(name, Role.DECODE, self._num_starts, **fields), self.now_s)
        if proven:
            self.prove(worker)
        return worker

    def prove(self, worker: Member, error: str = "") -> None:
        for prefill in self.prefills:
            self.pool.set_path(_path(prefill, worker, error))

    def kill(self, name: str) -> None:
        self.pool.remove(self[name])

    def speak(self, name: str) -> None:
        assert self.pool.beat(heartbeat(name, self[name].epoch, num_free_blocks=(100,)), self.now_s)

    def be_silent(self, name: str) -> None:
        """For so long that it may be dead, while all others that were not silent speak."""
        self.now_s += NET.worker_timeout_s * 0.6
        for worker in self.pool:
            if worker.id != name and not worker.silent:
                self.speak(worker.id)
        for worker in self.pool:
            if worker.silent:  # no longer than that
                worker.last_seen_s = self.now_s - NET.worker_timeout_s * 0.6
        assert self.pool.losses(self.now_s) == []

    def __getitem__(self, name: str) -> Member:
        worker = self.pool.find(name)
        assert worker is not None
        return worker

    @property
    def serving(self) -> set[str]:
        """Who gets requests, if many come: each goes to the least loaded."""
        chosen = set()
        for _ in range(20):
            route = choose(self.pool, LEAST)
            if route is None:
                break
            self.pool.ledger.assign(route, 0)
            chosen.add(route.decode.id)
        for worker in self.pool:
            worker.work.num_assigned = worker.work.num_unproven = worker.work.num_outstanding = 0
            worker.work.expected_blocks = (0,)
        return chosen


def _path(prefill: Member, decode: Member, error: str = "") -> KVPathReport:
    return kv_path(prefill.id, decode.id, prefill_epoch=prefill.epoch, epoch=decode.epoch, error=error)


def expected(there: set[str]) -> set[str]:
    """By the rule, for the workers above: ordinary ones, and standbys, by their ids, for whom too few serve."""
    serving = there & set(ORDINARY)
    for name in sorted(there & set(STANDBYS)):
        if len(serving) < STANDBYS[name]:
            serving.add(name)
    return serving


def test_a_standby_gets_nothing_until_a_worker_dies_and_nothing_new_when_it_is_back() -> None:
    crew = Crew("d0", "s0")
    assert crew.serving == {"d0"}
    crew.kill("d0")
    assert crew.serving == {"s0"}
    crew.start("d0")
    assert crew.serving == {"d0"}
    assert crew.pool.standbys.num_needed == {Role.DECODE: 1}


def test_what_a_standby_has_it_finishes_when_it_is_in_reserve_again() -> None:
    crew = Crew("s0")
    route = choose(crew.pool, LEAST)
    assert route is not None and route.decode is crew["s0"]
    crew.pool.ledger.assign(route, 1)
    crew.start("d0")
    assert crew["s0"].in_reserve and crew["s0"].work.num_assigned == 1
    crew.pool.ledger.release_prompt(route, 1)
    crew.pool.ledger.release(route)
    assert crew["s0"].work.num_assigned == 0


WORKERS = st.sampled_from([*ORDINARY, *STANDBYS])


@pytest.mark.medium
@given(
    events=st.lists(st.tuples(st.sampled_from(["start or kill", "drain", "silence"]), WORKERS)),
    prefill=st.booleans(),
)
def test_after_deaths_and_starts_in_any_order_those_in_reserve_follow_from_who_is_there(
    events: list[tuple[str, str]], prefill: bool
) -> None:
    crew, alive, gone = Crew(prefill=prefill), set[str](), set[str]()
    for kind, name in events:
        if kind == "start or kill":
            (crew.kill if name in alive else crew.start)(name)
            alive ^= {name}
            gone -= {name}
        elif name in alive and kind == "drain":
            crew.pool.drain(crew[name])
            gone |= {name}
        elif name in alive and not crew[name].draining:
            (crew.speak if name in gone else crew.be_silent)(name)
            gone ^= {name}
        serving = expected(alive - gone)
        assert {worker.id for worker in crew.pool if worker.in_reserve} - gone == alive - gone - serving
        assert crew.serving == serving


def test_who_leaves_is_silent_or_has_no_path_is_not_there() -> None:
    crew = Crew("d0", "s0")
    crew.prove(crew["d0"], error="broken")
    assert crew.serving == {"s0"}
    crew.prove(crew["d0"])
    assert crew.serving == {"d0"}
    crew.pool.beat(heartbeat("s0", crew["s0"].epoch, num_free_blocks=(100,)), 1.0)
    crew.pool.beat(heartbeat("p0", num_free_blocks=(100,)), 1.0)
    assert crew.pool.losses(2.0) == []
    assert crew.serving == {"s0"}
    crew.pool.beat(heartbeat("d0", crew["d0"].epoch, num_free_blocks=(100,)), 2.0)
    assert crew.serving == {"d0"}
    crew.pool.drain(crew["d0"])
    assert crew.serving == {"s0"}


def test_a_worker_that_has_met_nobody_yet_replaces_no_standby() -> None:
    """Or the decode worker would compute prompts itself, for which it is not warm."""
    crew = Crew("s0")
    back = crew.start("d0", proven=False)
    route = choose(crew.pool, LEAST)
    assert route is not None and (route.prefill.id, route.decode.id) == ("p0", "s0")
    crew.prove(back)
    route = choose(crew.pool, LEAST)
    assert route is not None and (route.prefill.id, route.decode.id) == ("p0", "d0")


def test_of_two_roles_only_that_is_needed_whose_worker_has_met_nobody_yet() -> None:
    crew = Crew("d0", "s0")
    again = crew.pool.add(ready("sp", Role.PREFILL, standby=1), 0.0)
    for name in ("d0", "s0"):
        crew.pool.set_path(_path(again, crew[name]))
    [first] = crew.prefills
    crew.pool.remove(first)
    back = crew.pool.add(ready("p0", Role.PREFILL, 2), 0.0)
    assert not again.in_reserve and crew["s0"].in_reserve
    crew.kill("d0")
    crew.pool.set_path(_path(back, crew["s0"]))
    assert again.in_reserve and not crew["s0"].in_reserve
    crew.prefills = []
    d0 = crew.start("d0")
    assert again.in_reserve and not crew["s0"].in_reserve
    crew.pool.set_path(_path(again, d0))
    assert not again.in_reserve and crew["s0"].in_reserve
    crew.pool.set_path(_path(back, d0))
    assert again.in_reserve and crew["s0"].in_reserve


def test_without_prefill_workers_standbys_stay_in_reserve() -> None:
    crew = Crew("d0", "s0")
    crew.pool.remove(crew.prefills[0])
    assert crew.serving == {"d0"}


def test_a_standby_that_is_in_reserve_counts_for_no_length() -> None:
    crew = Crew()
    crew.start("d0", max_model_len=500)
    crew.start("s0", max_model_len=1000)
    assert (max_model_len(crew.pool, 2000), most_tokens(crew.pool)) == (500, 500)
    crew.kill("d0")
    assert (max_model_len(crew.pool, 2000), most_tokens(crew.pool)) == (2000, 1000), "longer ones wait for the other"
    assert choose(crew.pool, Demand(10, 1001)) is None


def test_a_standby_is_for_workers_of_its_role_on_its_device() -> None:
    gpus = ["cuda:0 H200 GPU-a", "cuda:1 H200 GPU-b"]
    crew = Crew()
    for number, gpu in enumerate(gpus):
        crew.start(f"d{number}", device=gpu)
        crew.start(f"s{number}", device=gpu, standby=1)
    assert crew.serving == {"d0", "d1"}
    crew.kill("d1")
    assert crew.serving == {"d0", "s1"}
    again = crew.pool.add(ready("p1", Role.PREFILL, standby=1), 0.0)
    for name in ("d0", "s0", "s1"):
        crew.pool.set_path(_path(again, crew[name]))
    assert again.in_reserve
    crew.pool.remove(crew.prefills[0])
    assert not again.in_reserve
    route = choose(crew.pool, LEAST)
    assert route is not None and route.prefill is again


def test_health_says_who_is_in_reserve_and_since_when_and_why_another_is_needed() -> None:
    crew = Crew("d0", "s0")

    def standbys() -> list[Any]:
        body = report(crew.pool, [], RoleChanges(Incidents()), draining=False, now_s=crew.now_s)
        return [worker["standby"] for worker in body["workers"]["decode"]]

    assert standbys() == [
        None,
        {"stands_by_for": 1, "in_reserve": True, "needed_for_s": None, "needed_since": None},
    ]
    crew.now_s = 10.0
    crew.kill("d0")
    crew.now_s = 12.5
    [needed] = standbys()
    assert (needed["in_reserve"], needed["needed_for_s"]) == (False, 2.5)
    assert needed["needed_since"] == "decode worker d0 (epoch 1, pid 1) is gone"


@pytest.mark.parametrize("how", ["killed", "leaving"])
async def test_streams_of_a_lost_worker_go_on_at_its_standby(client: Client, cluster: Cluster, how: str) -> None:
    prompt, first = "the quick brown fox", cluster.workers[1]
    assert isinstance(first, FakeDecode)
    standby = cluster.decode("decode-standby", standby=1)
    await cluster.until_paths(2)
    for _ in range(3):
        await client.completions.create(model="tiny", prompt=prompt, max_tokens=3)
    prompts = cluster.workers[0].got(PrefillRequest)
    assert {request.decode_worker_id for request in prompts} == {"decode-0"}
    if how == "leaving":
        first.say(WorkerLeaving(first.worker_id, first.epoch))
        await cluster.until(lambda: cluster.service.pool.find("decode-0").draining, "it leaves")  # type: ignore[union-attr]
        running = asyncio.create_task(client.completions.create(model="tiny", prompt=prompt, temperature=0))
    else:
        first.mute = True
        running = asyncio.create_task(client.completions.create(model="tiny", prompt=prompt, temperature=0))
        await cluster.until(lambda: len(cluster.workers[0].got(PrefillRequest)) > len(prompts), "the request")
        await asyncio.to_thread(first.kill)
    assert (await running).choices[0].text == client.expected(prompt)
    last = cluster.workers[0].got(PrefillRequest)[-1]
    assert (last.decode_worker_id, last.decode_epoch) == ("decode-standby", standby.epoch)
    async with aiohttp.ClientSession(cluster.url) as session, session.get("/metrics") as response:
        metrics = await response.text()
    assert 'baton_standbys_needed_total{role="decode"} 1.0' in metrics
    assert 'baton_workers_in_reserve{role="decode"} 0.0' in metrics


def in_reserve(cluster: Cluster) -> list[str]:
    return [worker.id for worker in cluster.service.pool if worker.in_reserve]


async def test_both_may_die_at_once(client: Client, cluster: Cluster) -> None:
    first, standby = cluster.workers[1], cluster.decode("decode-standby", standby=1)
    await cluster.until_paths(2)
    first.mute = standby.mute = True
    running = asyncio.create_task(client.completions.create(model="tiny", prompt="the quick", temperature=0))
    await cluster.until(lambda: cluster.workers[0].got(PrefillRequest), "the request")
    await asyncio.gather(*(asyncio.to_thread(worker.kill) for worker in (first, standby)))
    cluster.decode("decode-0")
    cluster.decode("decode-standby", standby=1)
    assert (await running).choices[0].text == client.expected("the quick")
    await cluster.until(lambda: in_reserve(cluster) == ["decode-standby"], "the standby is in reserve again")


async def test_a_restarted_router_has_the_same_standby_in_reserve(
    start_cluster: StartCluster, client: Client, cluster: Cluster
) -> None:
    standby = cluster.decode("decode-standby", standby=1)
    await cluster.until_paths(2)
    endpoint = cluster.service.hub.endpoint
    await cluster.runner.cleanup()
    again = await start_cluster(endpoint)
    await again.until_paths(2)
    assert in_reserve(again) == ["decode-standby"]
    body = {"prompt": "the quick", "temperature": 0}
    async with aiohttp.ClientSession(again.url) as session, session.post("/v1/completions", json=body) as response:
        assert (await response.json())["choices"][0]["text"] == client.expected("the quick")
    assert not standby.got(KVOffer)
