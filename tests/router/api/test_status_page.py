"""The status page as an operator sees it, in a headless Chromium."""

import re
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
import tokenizers

from common.base.errors import ErrorCode
from common.wire.messages.memory_reports import MemoryHeartbeat, MemoryReady
from tests.router.api.browser import IS_THERE, WHY_NOT, Browser
from tests.router.conftest import Client, Cluster, StartCluster

pytestmark = pytest.mark.skipif(not IS_THERE, reason=WHY_NOT)

KEY = "sk-page-0123456789abcdef"
SCRIPT = "<img src=x onerror=document.title='run'>"
READY = "document.querySelectorAll('.worker').length === arguments[0]"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    browser = Browser()
    yield browser
    browser.close()


async def test_who_serves_is_drawn_with_what_it_does(client: Client, cluster: Cluster, browser: Browser) -> None:
    prefill, decode = cluster.workers
    for _ in range(40):
        decode.steps.note(0.002, 4, 4)
    await client.completions.create(model="tiny", prompt="the quick", max_tokens=20)
    await browser.open(cluster.url)
    await browser.until(READY, "two workers", 2)
    assert await browser.text("#state") == "● serving" or await browser.text("#state") == "serving"
    assert await browser.text("#model") == "tiny"
    assert "prefill-0" in await browser.text(".worker.prefill") and "decode-0" in await browser.text(".worker.decode")
    assert "prefill-0 → decode-0: shm 100 GB/s" in await browser.run(
        "return document.querySelector('#paths-list').textContent"
    )
    assert await browser.run("return document.querySelectorAll('#links .link.handoff').length") == 1
    assert await browser.run("return document.querySelector('#links .label').textContent") == "100 GB/s"
    decode.steps.note(0.002, 4, 4)
    await browser.until("document.querySelectorAll('#charts path.stroke').length > 0", "lines of what was measured")
    cluster.workers[1].kill()
    await browser.until(READY, "one worker is gone", 1)
    await browser.until("document.querySelector('#state').textContent === 'not serving'", "which is said")
    assert "no decode worker takes requests" in await browser.text("#problems")
    assert "decode worker decode-0" in await browser.text("#incidents li.lost")
    assert await browser.errors() == []
    assert prefill.worker_id in await browser.text("#devices")


async def test_single_requests_a_time_axis_and_the_gpu_are_shown(
    client: Client, cluster: Cluster, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster.service.memory_servers, "on_unreachable", lambda undelivered: None)
    ready = MemoryReady("memory-0", 1, 9, "1", "cpu")
    cluster.service.memory_servers.on_ready(b"memory-0", ready)
    beat = MemoryHeartbeat("memory-0", 1, 0, 0, 10, 5, 1, 0, 0, 0, 0, 0, 0, 0, (), 87, 64)
    cluster.service.memory_servers.on_heartbeat(b"memory-0", beat)
    await client.completions.create(model="tiny", prompt="the quick", max_tokens=20)
    with pytest.raises(openai.BadRequestError):
        await client.completions.create(model="tiny", prompt="the quick", max_tokens=-1)
    await browser.open(cluster.url)
    await browser.until("document.querySelector('#slowest li.request')", "the request that is over")
    told = await browser.text("#slowest")
    assert "20 of at most 20 tokens written" in told and "prefill-0 → decode-0" in told and "ended " in told
    assert await browser.text("#longest") == "No request is under way."
    assert await browser.text(".gpu-use") == "GPU 87 % busy · 64 °C"
    await browser.until("/\\d\\d:\\d\\d/.test(document.querySelector('.axis').innerText)", "times of the clock")
    refused = "[...document.querySelectorAll('.chart')].find(each => /refused/.test(each.innerText)).innerText"
    await browser.until(f"!/none yet/.test({refused})", "the request that was refused")
    assert await browser.errors() == []


async def test_a_replay_is_seen_and_how_often(client: Client, cluster: Cluster, browser: Browser) -> None:
    for _ in range(2):
        cluster.workers[0].fail_next = ErrorCode.PREEMPTED
        await client.completions.create(model="tiny", prompt="the quick", max_tokens=4)
    await browser.open(cluster.url)
    await browser.until("document.querySelector('#incidents li.replay')", "the replays")
    told = await browser.text("#incidents li.replay")
    assert "prefill-0: fake PREEMPTED" in told and "2 times" in told and re.search(r"\d\d:\d\d:\d\d, \d+ s ago", told)


async def test_a_prompt_can_be_tried(client: Client, cluster: Cluster, browser: Browser) -> None:
    await browser.open(cluster.url)
    await browser.until(READY, "two workers", 2)
    await browser.fill("#prompt", "the quick brown fox")
    await browser.fill("#max-tokens", "12")
    await browser.fill("#temperature", "0")
    await browser.click("#send")
    await browser.until("!document.querySelector('#send').disabled", "the end of the text")
    shown = await browser.run("return document.querySelector('#output').textContent")
    assert shown == client.expected("the quick brown fox", max_tokens=12)
    assert "after" in await browser.text("#outcome") and "prompt token" in await browser.text("#outcome")
    assert "the first after" in await browser.text("#outcome")
    assert await browser.errors() == []


async def test_a_chat_can_be_tried_and_what_is_refused_is_said(
    client: Client, cluster: Cluster, browser: Browser
) -> None:
    await browser.open(cluster.url)
    await browser.until(READY, "two workers", 2)
    await browser.run("document.querySelector('#mode').value = 'chat'")
    await browser.fill("#prompt", "fox")
    await browser.fill("#max-tokens", "5")
    await browser.click("#send")
    await browser.until("document.querySelector('#outcome').textContent.includes('after')", "the end of the answer")
    await browser.run("document.querySelector('#max-tokens').removeAttribute('max')")
    await browser.fill("#max-tokens", "999999")
    await browser.click("#send")
    await browser.until("document.querySelector('#outcome').className.includes('failed')", "the refusal")
    assert "999999" in await browser.text("#outcome")


async def test_a_stream_can_be_stopped_and_its_completion_ends(cluster: Cluster, browser: Browser) -> None:
    decode = cluster.decode("decode-slow", step_s=0.2)
    await cluster.until_paths(2)
    cluster.workers[1].kill()
    await browser.open(cluster.url)
    await browser.until("document.querySelector('#devices').textContent.includes('decode-slow')", "the slow worker")
    await browser.fill("#prompt", "the quick")
    await browser.fill("#max-tokens", "400")
    await browser.click("#send")
    await cluster.until(lambda: cluster.service.dispatcher.num_active == 1, "the completion")
    await browser.click("#stop")
    await cluster.until(lambda: cluster.service.dispatcher.num_active == 0, "its end")
    await browser.until("document.querySelector('#outcome').textContent === 'stopped'", "which is said")
    assert decode.worker_id == "decode-slow"


async def test_with_keys_the_page_asks_for_one_and_shows_nothing_before(
    start_cluster: StartCluster, browser: Browser, tmp_path: Path
) -> None:
    (tmp_path / "keys").write_text(KEY)
    cluster = await start_cluster(api_key_file=str(tmp_path / "keys"))
    cluster.prefill()
    cluster.decode()
    await cluster.until_paths(1)
    await browser.open(cluster.url)
    await browser.until("!document.querySelector('#key-form').hidden", "the question for a key")
    assert "tiny" not in await browser.text("body") and "decode-0" not in await browser.text("body")
    for key, expected in (("sk-wrong-0123456789abcdef", "no such API key"), (KEY, "")):
        await browser.fill("#key", key)
        await browser.run("document.querySelector('#key-form').requestSubmit()")
        if expected:
            hint = "document.querySelector('#key-hint').textContent.includes(arguments[0])"
            await browser.until(hint, "what is wrong", expected)
    await browser.until(READY, "two workers", 2)
    await browser.fill("#prompt", "the quick")
    await browser.click("#send")
    await browser.until("document.querySelector('#outcome').textContent.includes('after')", "a text")
    assert await browser.run("return document.documentElement.outerHTML.includes(arguments[0])", KEY) is False
    await browser.click("#forget-key")
    await browser.until("!document.querySelector('#key-form').hidden", "the question again")
    assert [error for error in await browser.errors() if "401" not in error] == []


async def test_what_a_worker_calls_itself_is_text(
    start_cluster: StartCluster, browser: Browser, tokenizer: tokenizers.Tokenizer
) -> None:
    cluster = await start_cluster()
    cluster.prefill(f"p{SCRIPT}", device=f"cuda:0 {SCRIPT} GPU-{SCRIPT}")
    cluster.decode(f"d{SCRIPT}", device=f"cuda:0 {SCRIPT} GPU-{SCRIPT}", path_error=SCRIPT)
    await cluster.until_paths(1)
    await browser.open(cluster.url)
    await browser.until("document.querySelector('#incidents li.lost')", "what failed")
    for selector in (".worker.prefill", ".worker.decode", "#incidents", "#devices h3"):
        assert SCRIPT in await browser.text(selector)
    assert await browser.run("return document.querySelectorAll('main img').length") == 0
    assert await browser.run("return document.title") != "run"
    assert await browser.errors() == []
    await browser.run("try { document.body.innerHTML = '<b>x</b>' } catch { document.title = 'refused' }")
    assert await browser.run("return document.title") == "refused", "text never becomes HTML, not even by mistake"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 768, 1240])
async def test_nothing_is_wider_than_the_window(
    start_cluster: StartCluster, browser: Browser, width: int, scheme: str
) -> None:
    cluster = await start_cluster()
    long = "x" * 70
    for number in range(2):
        cluster.prefill(f"prefill-{number}-{long}", device=f"cuda:{number} NVIDIA {long} GPU-{number}{long}")
        cluster.decode(f"decode-{number}-{long}", device=f"cuda:{number} NVIDIA {long} GPU-{number}{long}")
    await cluster.until_paths(4)
    await browser.prefer(prefers_color_scheme=scheme, prefers_reduced_motion="reduce")
    await browser.open(cluster.url, width)
    await browser.until(READY, "four workers", 4)
    assert await browser.run("return document.scrollingElement.scrollWidth") <= width
    assert await browser.run("return getComputedStyle(document.querySelector('#links')).display") == (
        "none" if width < 720 else "block"
    )
    dark = await browser.run("return getComputedStyle(document.body).backgroundColor")
    assert (dark == "rgb(14, 19, 26)") == (scheme == "dark")
    moving = "[...document.querySelectorAll('*')].filter(e => getComputedStyle(e).animationName !== 'none').length"
    assert await browser.run(f"return {moving}") == 0


async def test_a_router_that_is_gone_is_said_to_be(cluster: Cluster, browser: Browser) -> None:
    await browser.open(cluster.url)
    await browser.until(READY, "two workers", 2)
    for worker in cluster.workers:
        worker.kill()
    await cluster.runner.cleanup()
    await browser.until("document.querySelector('#state').textContent.startsWith('no contact since')", "no contact")
