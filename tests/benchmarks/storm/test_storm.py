"""A storm that sees nothing proves nothing: each fault of a server is noticed."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from benchmarks.storm.__main__ import main
from benchmarks.storm.blows import MEMORY, NETWORK, OF_NETWORK, ONE_HOST, ROUTER_HOST, TWO_HOSTS, Kind, plan
from benchmarks.storm.clients import Clients, Verdicts
from benchmarks.storm.hosts import WEATHERS, homes_of
from benchmarks.storm.leftovers import Holding, excess
from benchmarks.storm.requests import REFUSABLE, Answer, Case, make_cases, make_unread
from deploy.bench.client import open_session

USAGE = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
RIGHT = Answer({0: "ab"}, {0: "length"}, USAGE)
CASE = Case("a case", {"prompt": "x"})


def chunk(text: str, finish_reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish_reason}]}


USAGE_CHUNK = {"choices": [], "usage": USAGE}
STREAMS: dict[str, list[Any]] = {
    "answered": [chunk("a"), chunk("b", "length"), USAGE_CHUNK, "[DONE]"],
    "wrong": [chunk("a"), chunk("c", "length"), USAGE_CHUNK, "[DONE]"],
    "wrong, no usage": [chunk("a"), chunk("b", "length"), "[DONE]"],
    "wrong, no reason": [chunk("a"), chunk("b"), USAGE_CHUNK, "[DONE]"],
    "lost": [chunk("a"), {"error": {"message": "no"}}, "[DONE]"],
    "lost, no end": [chunk("a"), chunk("b", "length"), USAGE_CHUNK],
    "lost, two ends": [chunk("a"), chunk("b", "length"), chunk("", "length"), USAGE_CHUNK, "[DONE]"],
    "lost, two ends of the stream": [chunk("a"), chunk("b", "length"), USAGE_CHUNK, "[DONE]", "[DONE]"],
}


def sent(kind: str) -> str:
    """Return a stream as it is sent."""
    events = [event if isinstance(event, str) else json.dumps(event) for event in STREAMS[kind]]
    return "".join(f"data: {event}\n\n" for event in events)


@asynccontextmanager
async def serving(status: int, text: str, verdicts: Verdicts) -> AsyncIterator[Clients]:
    async def handle(_: web.Request) -> web.Response:
        return web.Response(status=status, text=text)

    app = web.Application()
    app.router.add_post("/v1/completions", handle)
    app.router.add_get("/live", handle)
    async with TestServer(app) as server, open_session() as session:
        url = f"http://{server.host}:{server.port}"
        yield Clients(session, url, 5.0, {CASE: RIGHT}, verdicts)


@pytest.mark.parametrize("kind", STREAMS)
async def test_every_stream_is_judged(kind: str) -> None:
    verdicts = Verdicts()
    async with serving(200, sent(kind), verdicts) as clients:
        await clients.check(CASE, stream=True)
    assert verdicts.num == {kind.split(",")[0]: 1}
    assert len(verdicts.faults) == (kind != "answered")


async def test_a_refusal_and_a_broken_live_are_noticed() -> None:
    verdicts = Verdicts()
    async with serving(503, '{"error": {}}', verdicts) as clients:
        await clients.check(CASE, stream=False)
        await clients.look(5.0)
        await clients.be_refused(REFUSABLE[0])
    assert verdicts.num == {"lost": 2, "wrong": 1}


def test_a_storm_follows_from_its_seed_and_has_every_kind_of_blow() -> None:
    prefills, decodes = ["prefill-0", "prefill-1"], ["decode-0", "decode-1"]
    blows = plan(1, 60.0, 2.0, prefills, decodes)
    assert blows == plan(1, 60.0, 2.0, prefills, decodes) != plan(2, 60.0, 2.0, prefills, decodes)
    assert {blow.kind for blow in blows} == set(ONE_HOST)
    assert [blow.at_s for blow in blows] == sorted(blow.at_s for blow in blows)
    assert {worker for blow in blows for worker in blow.targets} == {*prefills, *decodes, MEMORY}
    assert max(len(blow.targets) for blow in blows) > 1
    assert [case.fields for case in make_cases(1, 2048)] == [case.fields for case in make_cases(1, 2048)]


def test_a_storm_over_two_hosts_has_every_fault_of_the_network_among_its_blows() -> None:
    workers = [f"{role}-{n}" for role in ("prefill", "decode") for n in range(2)]
    homes = homes_of(workers)
    assert homes["prefill-0"] == homes["decode-1"] != homes["prefill-1"] == homes["decode-0"]
    blows = plan(1, 120.0, 2.0, workers[:2], workers[2:], sorted(set(homes.values())), TWO_HOSTS)
    assert {blow.kind for blow in blows} == set(Kind) == ONE_HOST.keys() | OF_NETWORK.keys()
    hosts = {NETWORK, ROUTER_HOST}
    assert all((blow.targets[0] in hosts) == (blow.kind in OF_NETWORK) for blow in blows)
    assert {blow.kind for blow in blows if blow.targets == (ROUTER_HOST,)} == {Kind.STILL}
    assert {blow.targets[0] for blow in blows if blow.kind in (Kind.FREEZE, Kind.FORGET)} == set(homes.values())
    pauses = {blow.kind: blow.pause_s for blow in blows}
    assert (pauses[Kind.CUT], pauses[Kind.LONG_CUT]) == (1.0, 60.0)
    assert WEATHERS.keys() == OF_NETWORK.keys() - {Kind.VANISH, Kind.STILL}
    assert main(["--kinds", "cut"]) == 2, "one host has no cable"


def test_what_is_left_over_is_found() -> None:
    before = {"router": Holding(40, 100 << 20), "decode-0": Holding(30, 200 << 20)}
    assert excess(before, {**before, "decode-1": Holding(32, 210 << 20)}) == []
    found = excess(before, {"router": Holding(400, 900 << 20), "decode-1": Holding(30, 1 << 20)})
    assert len(found) == 2 and all(name in " ".join(found) for name in ("400 files", "900 MB"))


async def test_a_client_that_does_not_read_is_counted_and_a_gap_of_a_stream_is_measured() -> None:
    verdicts = Verdicts()
    async with serving(200, sent("answered"), verdicts) as clients:
        await clients.leave_unread(make_unread(1), 0.01)
        await clients.check(CASE, stream=True)
    assert verdicts.num["unread"] == 1 and verdicts.longest_gap_s > 0.0
