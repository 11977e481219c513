"""Whoever shows no key learns nothing but that, wherever it goes; and pages of others call only when they may."""

import asyncio
import hmac
import logging
import os
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp.test_utils import make_mocked_request

from common.base.errors import ConfigError
from common.settings.config import Config, RouterSection
from common.settings.options import from_tables
from router.api.status import OPEN_TO_ALL
from router.http import api_keys
from router.http.api_keys import ApiKeys
from tests.router.conftest import Cluster, StartCluster

FIRST, SECOND, THIRD = "sk-first-0123456789abcdef", "sk-second-0123456789abcdef", "sk-third-0123456789abcdef"


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    path = tmp_path / "keys"
    path.write_text(f"# ours\n{FIRST}\n\n  {SECOND}  \n")
    return str(path)


async def statuses(cluster: Cluster, headers: dict[str, str]) -> dict[tuple[str, str], int]:
    """Of every route, and of one that does not exist."""
    routes = [
        (route.method, route.resource.canonical) for route in cluster.runner.app.router.routes() if route.resource
    ]
    found = {}
    async with aiohttp.ClientSession(cluster.url) as session:
        for method, path in [*routes, ("GET", "/nothing"), ("DELETE", "/v1/models"), ("OPTIONS", "/v1/models")]:
            asked = path.replace("{model_id}", "tiny").replace("{name}", "page.js")
            async with session.request(method, asked, headers=headers) as response:
                found[method, path] = response.status
                if response.status == 401 and method != "HEAD":
                    error = (await response.json())["error"]
                    assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
                    assert response.headers["WWW-Authenticate"] == "Bearer"
    return found


async def test_every_route_wants_a_key_but_those_that_tell_of_health_or_how_to_ask(
    start_cluster: StartCluster, key_file: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_keys, "LOOK_S", 0.05)
    caplog.set_level(logging.DEBUG)
    cluster = await start_cluster(api_key_file=key_file)
    refused = await statuses(cluster, {"Authorization": f"Bearer {FIRST}x"})
    open_to_all = {path for (_, path), status in refused.items() if status != 401}
    about = {"/docs", "/openapi.json", "/", "/status/{name}"}  # which say nothing of requests
    assert open_to_all == {"/live", "/health", "/ping", "/metrics", *about}
    assert len(OPEN_TO_ALL) == 3
    served = await statuses(cluster, {"Authorization": f"Bearer {FIRST}"})
    assert 401 not in served.values()
    assert served["GET", "/nothing"] == 404
    assert FIRST not in caplog.text


@pytest.mark.parametrize(
    ("headers", "is_allowed"),
    [
        ({"Authorization": f"Bearer {FIRST}"}, True),
        ({"Authorization": f"bEARER   {SECOND}"}, True),
        ({"X-Api-Key": SECOND}, True),
        ({"Authorization": "Bearer", "X-Api-Key": FIRST}, True),
        ({"Authorization": f"Bearer {FIRST[:-1]}"}, False),
        ({"Authorization": f"Bearer {FIRST} {SECOND}"}, False),
        ({"Authorization": f"Basic {FIRST}"}, False),
        ({"Authorization": FIRST}, False),
        ({"Authorization": "Bearer"}, False),
        ({"Authorization": "Bearer # ours"}, False),
        ({"X-Api-Key": ""}, False),
        ({"Authorization": "Bearer schlüssel-schlüssel"}, False),
        ({}, False),
    ],
)
async def test_how_a_key_is_shown(
    start_cluster: StartCluster, key_file: str, headers: dict[str, str], is_allowed: bool
) -> None:
    cluster = await start_cluster(api_key_file=key_file)
    async with aiohttp.ClientSession(cluster.url) as session, session.get("/v1/models", headers=headers) as response:
        assert response.status == (200 if is_allowed else 401)


async def test_without_keys_nobody_looks_at_what_is_shown(start_cluster: StartCluster) -> None:
    cluster = await start_cluster()
    for shown in ("Bearer", "Bearer none", "Basic x"):
        assert 401 not in (await statuses(cluster, {"Authorization": shown})).values()


async def test_every_key_is_compared_whichever_is_shown(
    start_cluster: StartCluster, key_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = []

    def compare(known: Any, shown: Any) -> bool:
        compared.append(known)
        return bool(known == shown)

    cluster = await start_cluster(api_key_file=key_file)
    monkeypatch.setattr(hmac, "compare_digest", compare)
    for key in (FIRST, SECOND, "x"):
        compared.clear()
        await statuses_of_models(cluster, key)
        assert len(set(compared)) == len(compared) == 2


async def test_keys_come_and_go_while_it_runs(
    start_cluster: StartCluster, key_file: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_keys, "LOOK_S", 0.05)
    caplog.set_level(logging.DEBUG)
    cluster = await start_cluster(api_key_file=key_file)

    async def until(**wanted: int) -> None:
        keys = {"first": FIRST, "second": SECOND, "third": THIRD}
        for _ in range(100):
            if {name: await statuses_of_models(cluster, keys[name]) for name in wanted} == wanted:
                return
            await asyncio.sleep(0.1)
        raise AssertionError(f"never: {wanted}")

    path = Path(key_file)
    await until(first=200, second=200, third=401)
    path.write_text(f"{SECOND}\n{THIRD}\n")
    await until(first=401, second=200, third=200)
    path.with_name("new").write_text(f"{FIRST}\n")
    path.with_name("new").replace(path)
    await until(first=200, second=401, third=401)
    path.write_text("short\n")
    for problem in ("line 1: a key is", "No such file"):
        for _ in range(100):
            assert await statuses_of_models(cluster, FIRST) == 200
            assert await statuses_of_models(cluster, SECOND) == 401
            if problem in caplog.text:
                break
            await asyncio.sleep(0.1)
        assert problem in caplog.text
        path.unlink(missing_ok=True)
    path.write_text(f"{THIRD}\n")
    await until(first=401, second=401, third=200)
    assert not any(key in caplog.text for key in (FIRST, SECOND, THIRD))


def test_a_key_that_stays_is_the_same_client(key_file: str) -> None:
    first, second = (ApiKeys(key_file).owner(shows(key)) for key in (FIRST, SECOND))
    Path(key_file).write_text(f"{SECOND}\n")
    assert first != second == ApiKeys(key_file).owner(shows(SECOND))


def shows(key: str) -> Any:
    return make_mocked_request("GET", "/", headers={"X-Api-Key": key})


async def statuses_of_models(cluster: Cluster, key: str) -> int:
    headers = {"Authorization": f"Bearer {key}"}
    async with aiohttp.ClientSession(cluster.url) as session, session.get("/v1/models", headers=headers) as response:
        return response.status


@pytest.mark.parametrize("text", ["", "# nothing\n", "short\n", f"{FIRST} {SECOND}\n", "schlüssel" * 3, "k" * 257])
def test_a_file_without_keys_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "keys").write_text(text)
    with pytest.raises(ConfigError, match=r"router\.api_key_file") as caught:
        ApiKeys(str(tmp_path / "keys"))
    assert not text.strip() or text.strip() not in str(caught.value)
    with pytest.raises(ConfigError, match=r"router\.api_key_file"):
        ApiKeys(str(tmp_path / "none"))


def test_keys_are_not_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a start and while it runs: who writes into a named pipe may never come; a shell's pipe ends."""
    monkeypatch.setattr(api_keys, "LOOK_S", 0.0)
    path = tmp_path / "keys"
    path.write_text(f"{FIRST}\n")
    keys = ApiKeys(str(path))
    path.unlink()
    os.mkfifo(path)
    assert keys.owner(shows(FIRST)) and f"{path}: it is a named pipe" in caplog.text
    with pytest.raises(ConfigError, match=rf"router\.api_key_file: {path}: it is a named pipe.*: name a regular file"):
        ApiKeys(str(path))
    receiving, sending = os.pipe()
    os.write(sending, f"{SECOND}\n".encode())
    os.close(sending)
    assert ApiKeys(f"/dev/fd/{receiving}").owner(shows(SECOND))
    os.close(receiving)


async def test_users_of_a_key_share_its_turns(start_cluster: StartCluster, key_file: str) -> None:
    cluster = await start_cluster(api_key_file=key_file)
    async with aiohttp.ClientSession(cluster.url) as session:
        asked = [
            asyncio.create_task(
                session.post("/v1/completions", json={"prompt": "a", "user": user}, headers={"X-Api-Key": key})
            )
            for user, key in (("a", FIRST), ("b", FIRST), ("c", FIRST), ("a", SECOND))
        ]
        await cluster.until(lambda: cluster.service.dispatcher.num_active == 4, "four completions queued")
        clients = [completion.spec.client for completion in cluster.service.dispatcher.active]
        assert sorted(Counter(clients).values()) == [1, 3]
        assert not any(key in client for client in clients for key in (FIRST, SECOND))
        for task in asked:
            task.cancel()


PAGE = "https://page.example"


async def preflight(
    cluster: Cluster, origin: str, names: str = "authorization, x-stainless-os"
) -> tuple[int, dict[str, str]]:
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": names}
    headers = asked | {"Origin": origin}
    async with (
        aiohttp.ClientSession(cluster.url) as session,
        session.options("/v1/completions", headers=headers) as response,
    ):
        return response.status, dict(response.headers)


@pytest.mark.parametrize(("origins", "told"), [(f"https://other.example,{PAGE}", PAGE), ("*", "*")])
async def test_a_page_that_may_call(start_cluster: StartCluster, key_file: str, origins: str, told: str) -> None:
    cluster = await start_cluster(cors_origins=origins, api_key_file=key_file)
    status, headers = await preflight(cluster, PAGE)
    assert (status, headers["Access-Control-Allow-Origin"]) == (204, told)
    assert "authorization" in headers["Access-Control-Allow-Headers"]
    page = aiohttp.ClientSession(cluster.url, headers={"Origin": PAGE})
    async with page, page.get("/v1/models") as response:  # an error is for the page, too
        assert (response.status, response.headers["Access-Control-Allow-Origin"]) == (401, told)
        assert "X-Request-Id" in response.headers["Access-Control-Expose-Headers"]


async def test_names_of_headers_that_cannot_be_written_are_not_allowed(start_cluster: StartCluster) -> None:
    cluster = await start_cluster(cors_origins="*")
    status, headers = await preflight(cluster, PAGE, "schlüssel")
    assert (status, "Access-Control-Allow-Headers" in headers) == (204, False)


@pytest.mark.parametrize("origins", ["", "https://other.example"])
async def test_a_page_that_may_not(start_cluster: StartCluster, origins: str) -> None:
    cluster = await start_cluster(cors_origins=origins)
    status, headers = await preflight(cluster, PAGE)
    assert status == 405
    assert not [name for name in headers if name.startswith("Access-Control")]
    assert ("Vary" in headers) == bool(origins)


@pytest.mark.parametrize("origins", ["page.example", "https://a b", "https://a,*", "https://a,"])
def test_what_is_no_origin_is_refused(origins: str) -> None:
    assert from_tables(Config, {"router": {"cors_origins": PAGE}}).router.cors_origins == PAGE
    assert RouterSection().cors_origins == ""
    with pytest.raises(ConfigError, match=r"router\.cors_origins"):
        from_tables(Config, {"router": {"cors_origins": origins}})
