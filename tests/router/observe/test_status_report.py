"""What the status page is told, and the page itself, without a browser: `test_status_page` has one."""

import json
import re
from html.parser import HTMLParser
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.base.errors import ErrorCode, RequestError
from common.settings.config import NetSection
from common.wire.values.step_counts import StepMeter
from router.api.status_page_files import FILES
from router.dispatch.completion.summary import NUM_PERIODS, NUM_SLOWEST
from router.dispatch.incidents import NUM_KEPT, Incidents, Kind
from router.observe.history import NUM_SAMPLES, PERIOD_S, History, quantile
from router.observe.status_report import KEPT_S, MAX_PATHS, StatusReporter
from router.text.model_info import ModelInfo
from router.workers.hub import Links
from router.workers.memory_servers import MemoryServers
from tests.router.bench import LENGTH, Bench
from tests.router.conftest import Client, Cluster
from tests.support.messages import heartbeat, kv_path

SECRET = "nobody else is to read this"
LEAST_CONTRAST = 4.5
"""Of WCAG 2.1, level AA."""


def reporter(bench: Bench) -> StatusReporter:
    servers = MemoryServers(Links(NetSection(), 1, lambda identity, message: True))
    info = ModelInfo("m", "f", "t", 1000, 4096, ())
    return StatusReporter(info, bench.pool, servers, bench.dispatcher, bench.metrics, has_chats=False)


# --- what is told --------------------------------------------------------------------------------


def test_a_report_has_every_worker_on_its_device_and_how_its_steps_were() -> None:
    bench = Bench(num_prefill=2, num_decode=1)
    status, meter = reporter(bench), StepMeter()
    worker = bench.decodes[0]
    bench.pool.beat(heartbeat(worker.id, worker.epoch, steps=meter.counts()), bench.now_s)
    bench.now_s += PERIOD_S
    status.history.tick()
    for _ in range(100):
        meter.note(0.015, 8, 8)
    bench.pool.beat(heartbeat(worker.id, worker.epoch, steps=meter.counts()), bench.now_s)
    bench.now_s += PERIOD_S
    status.history.tick()
    (device,) = status.report(bench.now_s)["devices"]
    assert [each["id"] for each in device["workers"]] == ["d0", "p0", "p1"]
    told = device["workers"][0]
    assert (told["role"], told["state"], told["decoding"]) == ("decode", "serving", 0)
    assert (told["step_ms"], told["tokens_per_s"], told["busy"]) == (15.0, 0.0, 1.5 / PERIOD_S)
    assert device["workers"][1]["step_ms"] is None
    bench.pool.beat(heartbeat("p0", in_turns=True), bench.now_s)
    (device,) = status.report(bench.now_s)["devices"]
    assert [each["in_turns"] for each in device["workers"]] == [False, True, False]


def test_all_numbers_of_a_report_are_of_one_moment_and_add_up() -> None:
    """Whatever workers say, and whenever: completions under way are counted once, by phase and by worker."""
    bench = Bench(num_prefill=2, num_decode=2, prefill_window=100.0)
    status = reporter(bench)
    completions = [bench.submit() for _ in range(9)]
    for number, completion in enumerate(completions):
        route = completion.attempt.route
        assert route is not None
        if number >= 3:
            bench.token(route.prefill, completion, 0, 1)
        if number >= 5:
            bench.token(route.decode, completion, 1, 2)
    for worker in bench.decodes:
        bench.pool.beat(heartbeat(worker.id, worker.epoch, num_running=77, num_waiting=5, num_handoffs=9), bench.now_s)
    bench.now_s += PERIOD_S
    status.history.tick()
    told = status.report(bench.now_s)
    workers = [worker for device in told["devices"] for worker in device["workers"]]
    by_phase = {phase: sum(worker[name] for worker in workers) for phase, name in (
        ("prefill", "prompts"), ("handoff", "handoffs"), ("decode", "decoding"),
    )}  # fmt: skip
    assert told["phases"] == {"queued": 0, "prefill": 3, "handoff": 2, "decode": 4}
    assert by_phase | {"queued": told["queued"]} == told["phases"]
    assert sum(worker["coming"] for worker in workers) == 3
    assert told["running"] == told["history"]["running"][-1] == 9
    decoded = sum(worker["tokens_per_s"] for worker in workers if worker["role"] == "decode")
    assert decoded == pytest.approx(told["history"]["tokens_per_s"][-1]) and decoded > 0
    assert [each["id"] for each in told["longest"]] == [each.spec.request_id for each in completions[:NUM_SLOWEST]]
    assert told["longest"][0]["phase"] == "prefill" and told["longest"][0]["prefill_ms"] == 1e3 * PERIOD_S


def test_the_slowest_requests_of_the_last_minutes_are_told_with_where_their_time_went() -> None:
    bench = Bench()
    status = reporter(bench)
    for number in range(3 * NUM_SLOWEST):
        completion = bench.submit(max_tokens=1)
        bench.now_s += 0.1 * (1 + number % 12)
        bench.token(bench.prefills[0], completion, 0, 1, LENGTH)
    told = status.report(bench.now_s)["slowest"]
    assert len(told) == NUM_SLOWEST
    assert [each["e2e_ms"] for each in told] == sorted((each["e2e_ms"] for each in told), reverse=True)
    assert told[0] | {"id": "", "ended_s": 0} == {
        "id": "", "phase": None, "outcome": "length", "prompt_tokens": 4, "output_tokens": 1, "most_tokens": 1,
        "attempts": 1, "queued_ms": 0.0, "prefill_ms": 1200.0, "handoff_ms": 0.0, "decode_ms": 0.0, "ttft_ms": 1200.0,
        "e2e_ms": 1200.0, "cached_tokens": 0, "prefill_worker": "p0", "decode_worker": "d0", "ended_s": 0,
    }  # fmt: skip
    bench.now_s += NUM_PERIODS * 30.0 + 60.0
    assert status.report(bench.now_s)["slowest"] == [], "that is long ago"


def test_errors_and_refusals_a_second_are_samples_too_and_each_is_counted_once() -> None:
    bench = Bench()
    status = reporter(bench)
    bench.submit()
    error = RequestError("the server shut down", code="server_draining", status=503)
    bench.dispatcher.fail_all(error)
    for refused in (error, RequestError("no"), RequestError("busy", code="rate_limit_exceeded", status=429)):
        bench.metrics.count_refusal(refused)  # as the HTTP side tells it, of the failed completion, too
    bench.now_s += PERIOD_S
    status.history.tick()
    sample = status.history.samples[-1]
    assert (sample.failed_per_s, sample.refused_per_s) == (1 / PERIOD_S, 2 / PERIOD_S)


def test_samples_are_what_happened_in_their_period_and_no_more_are_kept_than_are_shown() -> None:
    bench = Bench()
    servers = MemoryServers(Links(NetSection(), 1, lambda identity, message: True))
    history = History(bench.metrics, bench.pool, servers, bench.dispatcher.queue_sizes)
    completion = bench.submit()
    bench.now_s += 0.05
    bench.token(bench.prefills[0], completion, 0, 1)
    bench.now_s += PERIOD_S
    history.tick()
    history.tick()
    (first,) = history.samples
    assert first.ttft_p50_ms is not None and 40 <= first.ttft_p50_ms <= 60
    assert (first.itl_p50_ms, first.running, first.queued) == (None, 1, 0)
    assert first.tokens_per_s == pytest.approx(1 / (PERIOD_S + 0.05), abs=0.1)
    for _ in range(2 * NUM_SAMPLES):
        bench.now_s += PERIOD_S
        history.tick()
    assert len(history.samples) == NUM_SAMPLES
    assert history.samples[-1].ttft_p50_ms is None


@given(st.lists(st.floats(0.001, 9.0), min_size=1, max_size=60), st.floats(0.01, 1.0))
def test_a_quantile_is_in_the_bucket_of_the_value_that_it_is_of(values: list[float], share: float) -> None:
    bounds = (0.01, 0.1, 0.5, 1.0, 2.0, 10.0)
    cumulative = [float(sum(value <= bound for value in values)) for bound in (*bounds, float("inf"))]
    found, rank = quantile(bounds, cumulative, share), share * len(values)
    assert found is not None
    wanted = sorted(values)[min(len(values) - 1, max(0, int(-(-rank // 1)) - 1))]
    number = next(number for number, bound in enumerate(bounds) if wanted <= bound)
    assert (bounds[number - 1] if number else 0.0) <= found <= bounds[number]
    assert quantile(bounds, [0.0] * 7, share) is None


def test_a_report_serves_all_who_ask_within_a_moment() -> None:
    bench = Bench()
    status = reporter(bench)
    first = status.body()
    bench.submit()
    bench.now_s += KEPT_S / 2
    assert status.body() is first
    bench.now_s += KEPT_S
    assert json.loads(status.body())["phases"]["prefill"] == 1


def test_of_many_kv_paths_those_that_failed_are_told() -> None:
    bench = Bench(num_prefill=12, num_decode=8)
    bench.pool.set_path(kv_path("p11", "d7", error="no way"))
    told = reporter(bench).report(bench.now_s)
    assert (len(told["kv_paths"]), told["num_kv_paths"]) == (MAX_PATHS, 96)
    assert told["kv_paths"][0] | {"gb_per_s": 0} == {
        "prefill": "p11", "decode": "d7", "transport": "shm", "gb_per_s": 0, "error": "no way",
    }  # fmt: skip


def test_what_happens_often_is_one_incident_and_few_are_kept() -> None:
    incidents = Incidents(iter(range(1000)).__next__)
    for number in range(300):
        incidents.add(Kind.REPLAY, "p0: gone")
        incidents.add(Kind.LOST, f"worker {number // 3}")
    kept = list(incidents)
    assert len(kept) == NUM_KEPT
    assert (kept[-2].text, kept[-2].num, kept[-1].num) == ("p0: gone", 300, 3)
    incidents.add(Kind.FAILED, "x" * 10_000)
    assert len(list(incidents)[-1].text) < 1000


def test_incidents_say_why_a_request_failed_but_not_what_its_client_sent() -> None:
    bench = Bench()
    completion = bench.submit()
    bench.fail(bench.prefills[0], completion, ErrorCode.PREEMPTED)
    bench.fail(bench.prefills[0], completion, ErrorCode.GRAMMAR)
    assert completion.timing is not None
    bench.submit()
    bench.dispatcher.fail_all(RequestError("the server shut down", code="server_draining", status=503))
    told = [(incident.kind, incident.text) for incident in bench.metrics.incidents]
    assert told == [
        (Kind.REPLAY, "p0: because"),
        (Kind.FAILED, "grammar_dead_end"),
        (Kind.FAILED, "server_draining: the server shut down"),
    ]


async def test_a_report_has_no_word_of_any_prompt(client: Client, cluster: Cluster) -> None:
    fields: dict[str, Any] = {"model": "tiny", "prompt": SECRET, "user": SECRET, "stop": [SECRET]}
    await client.completions.create(**fields, max_tokens=4, extra_headers={"X-Request-Id": SECRET})
    async with aiohttp.ClientSession(cluster.url) as session, session.get("/status.json") as response:
        assert (response.status, response.content_type) == (200, "application/json")
        assert response.headers["Cache-Control"] == "no-store"
        assert SECRET not in await response.text()


# --- the page ------------------------------------------------------------------------------------


class Page(HTMLParser):
    """Its elements, and which fields have a label."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.unlabelled: list[str] = []
        self.feed(FILES["index.html"].decode())
        labels = {attributes.get("for") for tag, attributes in self.elements if tag == "label"}
        self.unlabelled = [name for name in self.unlabelled if name not in labels]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.elements.append((tag, attributes))
        if tag in ("input", "select", "textarea") and "label" not in self.open:
            self.unlabelled.append(attributes.get("id") or "")
        if tag not in ("input", "meta", "link", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self.open.pop() != tag:
            pass


SCRIPTS = {name: content.decode() for name, content in FILES.items() if name.endswith(".js")}


def test_every_element_that_a_script_names_is_there_once() -> None:
    ids = [attributes["id"] for _, attributes in Page().elements if "id" in attributes]
    assert len(set(ids)) == len(ids)
    named = {name for text in SCRIPTS.values() for name in re.findall(r'byId\("([\w-]+)"\)', text)}
    assert len(named) > 30 and named <= set(ids)


def test_every_part_of_the_page_is_served_by_it_and_nothing_is_inline() -> None:
    page = Page()
    assert not [name for _, attributes in page.elements for name in attributes if name == "style" or name[:2] == "on"]
    linked = [attributes.get("src") or attributes.get("href") for _, attributes in page.elements]
    files = {link.removeprefix("status/") for link in linked if link and link.startswith("status/")}
    assert {"page.js", "page.css", "icon.svg"} <= files <= set(FILES)
    assert {link for link in linked if link} - {f"status/{name}" for name in files} == {"docs", "metrics", "health"}
    assert all(attributes.get("src") for tag, attributes in page.elements if tag == "script")
    imported = {name for text in SCRIPTS.values() for name in re.findall(r'from "\./([\w.]+)"', text)}
    assert imported | {"page.js"} == set(SCRIPTS)
    for name, content in FILES.items():
        others = set(re.findall(rb"https?://[^\"' )]+", content)) - {b"http://www.w3.org/2000/svg"}
        assert not others, f"{name} names {others}"
        assert content.count(b"\n") <= 350


def test_no_script_takes_text_for_anything_else() -> None:
    for name, text in SCRIPTS.items():
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", text), name


def test_every_field_has_a_label_and_the_page_a_language() -> None:
    page = Page()
    assert page.unlabelled == []
    assert dict(page.elements)["html"] == {"lang": "en"}
    headings = [tag for tag, _ in page.elements if tag in ("h1", "h2", "h3")]
    assert [heading for heading in headings if heading != "h3"] == ["h1", *["h2"] * 6]


def test_all_text_can_be_read_in_light_and_in_dark() -> None:
    style = FILES["page.css"].decode()
    light, dark = [dict(re.findall(r"--([\w-]+): (#\w{6});", part)) for part in style.split("@media", 2)[:2]]
    assert light.keys() == dark.keys()
    for colours in (light, dark):
        for text in ("text", "muted", "queued", "prefill", "handoff", "decode", "ok", "bad"):
            for ground in ("card", "page"):
                assert contrast(colours[text], colours[ground]) >= LEAST_CONTRAST, (text, ground)
        assert contrast(colours["on-button"], colours["button"]) >= LEAST_CONTRAST
        assert contrast(colours["muted"], colours["track"]) >= LEAST_CONTRAST
    assert "prefers-reduced-motion: reduce" in style


def contrast(one: str, other: str) -> float:
    lighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def luminance(colour: str) -> float:
    channels = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


async def test_the_page_may_run_and_load_nothing_but_itself(cluster: Cluster) -> None:
    async with aiohttp.ClientSession(cluster.url) as session:
        for path, kind in [
            ("/", "text/html"),
            *((f"/status/{name}", "") for name in FILES),
        ]:
            async with session.get(path) as response:
                assert response.status == 200 and response.content_type.startswith(kind)
                policy = response.headers["Content-Security-Policy"]
                assert policy.startswith("default-src 'none'; script-src 'self'; ") and "unsafe" not in policy
                assert "frame-ancestors 'none'" in policy and "require-trusted-types-for 'script'" in policy
                assert response.headers["X-Content-Type-Options"] == "nosniff"
                version = response.headers["ETag"]
            async with session.get(path, headers={"If-None-Match": version}) as response:
                assert (response.status, await response.read()) == (304, b"")
        for path in ("/status/", "/status/nothing.js", "/status/..%2fapp.py", "/status/%2e%2e/app.py"):
            async with session.get(path) as response:
                assert response.status == 404
