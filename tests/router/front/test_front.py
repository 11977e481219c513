"""Fronts over a router and fakes, in a process: what is lost between them, limits, shares, and an absent dispatcher."""

import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import openai
import pytest
import tokenizers
from aiohttp import web

from common.settings.config import Config, NetSection, RouterSection
from common.wire.messages.fronts import FrontChoice, FrontDone, FrontOrder, FrontPrompt, FrontTokens
from common.wire.messages.worker import Message
from router.api.app import start_server
from router.api.http_request import SERVICE
from router.front.link import DispatcherLink
from router.front.service import FrontService
from tests.router.conftest import Client, Cluster, StartCluster
from tests.support.fakes import free_endpoint

PROMPT = "the quick brown fox"
NUM_TOKENS = 40


@dataclasses.dataclass
class Front:
    service: FrontService
    client: openai.AsyncOpenAI
    runner: web.AppRunner

    async def text(self, prompt: str = PROMPT, **fields: Any) -> str:
        body = {"max_tokens": NUM_TOKENS, "temperature": 0.0} | fields
        answer = await self.client.completions.create(model="tiny", prompt=prompt, **body)
        return answer.choices[0].text


StartFront = Callable[..., Awaitable[Front]]


@pytest.fixture
async def dispatching(start_cluster: StartCluster) -> Cluster:
    """A router that takes fronts, with two workers."""
    cluster = await start_cluster(front_endpoint=free_endpoint(), max_requests=4)
    cluster.prefill()
    cluster.decode(step_s=0.005)
    await cluster.until_paths(1)
    return cluster


@pytest.fixture
async def start_front(dispatching: Cluster) -> AsyncIterator[StartFront]:
    fronts: list[Front] = []

    async def start(net: NetSection | None = None, name: str = "", **router: Any) -> Front:
        config = dispatching.service.config
        fields: dict[str, Any] = {"port": 0, "front_endpoint": config.router.front_endpoint} | router
        section = RouterSection(**fields)
        model = dataclasses.replace(config.model, name=name or config.model.name)
        ours = Config(model=model, net=net or config.net, router=section)
        runner, url = await start_server(ours, FrontService)
        service = runner.app[SERVICE]
        assert isinstance(service, FrontService)
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=100.0)
        fronts.append(Front(service, client, runner))
        return fronts[-1]

    yield start
    for front in fronts:
        await front.client.close()
        await front.runner.cleanup()


@pytest.mark.parametrize("lost", [FrontTokens, FrontPrompt, FrontOrder, FrontDone])
async def test_a_lost_message_costs_a_session_and_no_text(
    dispatching: Cluster,
    start_front: StartFront,
    tokenizer: tokenizers.Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
    lost: type[Message],
) -> None:
    """Each kind once, in the midst of texts; the ends of texts without a stop string are no messages of the front."""
    wanted = Client(dispatching, tokenizer).expected(PROMPT, max_tokens=NUM_TOKENS)
    front = await start_front()
    await dispatching.until(lambda: front.service.link.has_session, "a session")
    hub, link = dispatching.service.front_hub, front.service.link
    assert hub is not None
    assert link._spoke is not None
    num_sent = {lost: 0}

    def losing(send: Callable[..., Any]) -> Callable[..., Any]:
        def send_but_one(*args: Any) -> Any:
            if isinstance(args[-1], lost):
                num_sent[lost] += 1
                if num_sent[lost] == (3 if lost is FrontTokens else 1):
                    return True
            return send(*args)

        return send_but_one

    monkeypatch.setattr(hub, "send", losing(hub.send))
    monkeypatch.setattr(dispatching.service.fronts, "_send", hub.send)
    monkeypatch.setattr(link._spoke, "send", losing(link._spoke.send))
    stop = wanted[5:8]
    assert await front.text(stop=stop) == wanted[: wanted.index(stop)]
    assert await front.text() == wanted
    await dispatching.until(lambda: front.service.counts.num_lost == 1, "one session is lost")
    await dispatching.until(lambda: not dispatching.service.dispatcher.num_active, "nothing is left")


async def test_a_request_that_ends_every_session_fails_alone(
    dispatching: Cluster, start_front: StartFront, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one that the dispatcher cannot read."""
    front = await start_front(max_attempts=2)
    await dispatching.until(lambda: front.service.link.has_session, "a session")
    unreadable = {"max_tokens": 0}
    monkeypatch.setattr("router.front.open_choice.FrontChoice", lambda **fields: FrontChoice(**fields | unreadable))
    with pytest.raises(openai.InternalServerError, match="2 sessions with the dispatcher ended"):
        await front.text()
    monkeypatch.undo()
    assert await front.text()


async def test_the_dispatchers_limits_and_shares_hold_for_the_clients_of_fronts(
    dispatching: Cluster, start_front: StartFront
) -> None:
    fronts = [await start_front(min_priority=-5), await start_front()]
    for front in fronts:
        await dispatching.until(lambda front=front: front.service.link.has_session, "a session")  # type: ignore[misc]
    dispatching.workers[1].most_outputs = 2  # type: ignore[attr-defined]
    with pytest.raises(openai.BadRequestError, match=r"at least router\.min_priority, 0"):
        await fronts[0].text(extra_body={"priority": -5})
    streams = [
        await front.client.completions.create(model="tiny", prompt=PROMPT, n=2, user=user, stream=True, max_tokens=30)
        for front, user in zip(fronts, ("ann", "bob"), strict=True)
    ]
    active = dispatching.service.dispatcher.active
    assert sorted(completion.spec.client for completion in active) == ["ann", "ann", "bob", "bob"]
    for front in fronts:
        with pytest.raises(openai.RateLimitError, match="in flight, limit 4") as caught:
            await front.text()
        assert caught.value.response.headers["Retry-After"] == "1"
    await streams[0].close()
    await dispatching.until(lambda: dispatching.service.dispatcher.num_active == 2, "ann has left")
    dispatching.workers[1].most_outputs = 1 << 30  # type: ignore[attr-defined]
    async for _ in streams[1]:
        pass
    assert dispatching.service.dispatcher.num_active == 0


async def test_a_front_tells_of_itself_and_the_dispatcher_of_the_whole_system(
    dispatching: Cluster, start_front: StartFront
) -> None:
    """A sum over all fronts and the router counts nothing twice."""
    front = await start_front()
    await dispatching.until(lambda: front.service.link.has_session, "a session")
    assert await front.text()
    told = {}
    for name, base in (("front", str(front.client.base_url).removesuffix("/v1/")), ("router", dispatching.url)):
        async with aiohttp.ClientSession(base) as session, session.get("/metrics") as response:
            lines = (await response.text()).splitlines()
        told[name] = {line.split()[0].partition("{")[0]: line.split()[-1] for line in lines if line[:1] != "#"}
    assert all(name.startswith("baton_front_") for name in told["front"])
    assert told["front"]["baton_front_tokens_total"] == f"{NUM_TOKENS}.0"
    assert told["front"]["baton_front_connected"] == "1.0"
    assert "baton_requests_total" in told["router"] and not told["front"].keys() & told["router"].keys()


async def test_requests_wait_for_a_dispatcher_and_then_fail_with_the_reason(start_front: StartFront) -> None:
    front = await start_front(front_endpoint=free_endpoint(), worker_wait_s=0.3)
    with pytest.raises(openai.InternalServerError, match=r"no dispatcher for 0\.3 s") as caught:
        await front.text()
    assert (caught.value.status_code, caught.value.response.headers["Retry-After"]) == (503, "5")
    health = await front.service.health()
    assert health["status"] == "unavailable"
    assert front.service.link.endpoint in health["problems"][0]
    assert not front.service.link.open


@pytest.mark.parametrize("is_refused", [False, True])
async def test_a_front_without_a_session_says_once_why(
    dispatching: Cluster,
    start_front: StartFront,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    is_refused: bool,
) -> None:
    begun: list[DispatcherLink] = []
    begin = DispatcherLink._begin

    def counted(link: DispatcherLink) -> None:
        begun.append(link)
        begin(link)

    monkeypatch.setattr(DispatcherLink, "_begin", counted)
    net = dataclasses.replace(dispatching.service.config.net, heartbeat_s=0.02, worker_timeout_s=0.1)
    if is_refused:
        front = await start_front(net, name="other")
        reason = "the dispatcher refused this front: model name is other"
    else:
        front = await start_front(net, front_endpoint=free_endpoint())
        reason = f"no answer yet from a dispatcher at {front.service.link.endpoint}"
    await dispatching.until(lambda: len(begun) > 4, "more sessions")
    told = [each.getMessage() for each in caplog.records if each.name == "router.front.link"]
    assert len(told) == 1 and told[0].startswith(reason)
    if is_refused:
        assert front.service.link.problem.startswith("model name is other")
