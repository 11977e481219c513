"""Clients of several fronts: keys, limits and shares are those of one router, and one port serves them all."""

import asyncio
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from common.wire.transport.port_sharing import PortOffer
from tests.e2e.client import prompts
from tests.e2e.fronts import Fronts
from tests.router.api.test_succession import under_load

pytestmark = pytest.mark.medium

DEMO = Path(__file__).parents[2] / "deploy" / "demo_model"
KEYS = {"ann": "sk-ann-0123456789abcdef", "bob": "sk-bob-0123456789abcdef"}
LENGTH, MANY, FEW, MOST = 60, 20, 4, 28
"""Tokens of a prompt, prompts of the client who floods, those of others, and completions that the router takes."""


async def ask(url: str, who: str, prompt: list[int], **fields: Any) -> tuple[int, Any]:
    """Status and body of a completion asked for with a client's key."""
    headers = {"Authorization": f"Bearer {KEYS[who]}"} if who in KEYS else {}
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, **fields}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.post(f"{url}/v1/completions", json=body) as response,
    ):
        return response.status, await response.json()


def num_active(system: Fronts) -> int:
    """Completions that the dispatcher has, by a page that needs no key."""
    names = ("baton_requests_queued", "baton_requests_running")
    lines = [line.split() for line in system.text("/metrics").splitlines()]
    return sum(int(float(value)) for name, *_, value in lines if name in names)


async def test_keys_limits_and_shares_are_those_of_one_router(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("\n".join(KEYS.values()))
    flags = ["--router-api-key-file", str(keys), "--router-max-requests", str(MOST), "--router-prefill-window", "0.1"]
    with Fronts(DEMO, router_flags=flags).start() as system:
        first, second = (system.start_front(name) for name in ("front-0", "front-1"))
        for url in (system.url, first, second):
            for headers in ({}, {"X-Api-Key": "sk-eve-0123456789abcdef"}):
                async with aiohttp.ClientSession(url, headers=headers) as session, session.get("/v1/models") as refused:
                    assert refused.status == 401
                    assert (await refused.json())["error"]["code"] == "invalid_api_key"

        # What one front had computed another finds for the same key, and nobody else does.
        [known] = prompts(1, 400, 400, seed=1)
        cached = []
        for url, who in ((first, "ann"), (second, "ann"), (second, "bob"), (first, "bob")):
            status, answer = await ask(url, who, known)
            assert status == 200
            cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert cached[0] == cached[2] == 0 and cached[1] == cached[3] > 0

        # Prompts of a client wait for each other, through whichever front they come, and for nobody else's.
        ended: list[str] = []

        async def flood(url: str, who: str, name: str, count: int, seed: int) -> "list[asyncio.Task[None]]":
            async def one(prompt: list[int]) -> None:
                assert (await ask(url, who, prompt))[0] == 200
                ended.append(name)

            before = num_active(system)
            tasks = [asyncio.create_task(one(prompt)) for prompt in prompts(count, LENGTH, LENGTH, seed=seed)]
            await asyncio.to_thread(system.until, lambda: num_active(system) == before + count)
            return tasks

        system.holds.prompt_steps.set(0)
        tasks = await flood(first, "ann", "ann", MANY, 2)
        tasks += await flood(second, "ann", "ann again", FEW, 3)
        tasks += await flood(second, "bob", "bob", FEW, 4)
        for url in (system.url, first, second):
            for who, expected in (("ann", 429), ("bob", 429), ("nobody", 401)):
                status, answer = await ask(url, who, known)
                assert status == expected, answer
        system.release()
        await asyncio.gather(*tasks)
        places = {name: [place for place, each in enumerate(ended) if each == name] for name in set(ended)}
        assert len(ended) == MANY + 2 * FEW
        assert max(places["bob"]) < 4 * FEW, f"behind as many of ann's as of his own, and a few: {ended}"
        assert min(places["ann again"]) > MANY, f"another front is no other client: {ended}"


@pytest.fixture
async def held(tmp_path: Path) -> AsyncIterator[tuple[str, Path]]:
    """A port that this process holds; its URL, and where it is handed out."""
    path = tmp_path / "http.sock"
    with socket.create_server(("127.0.0.1", 0), backlog=100) as listener:
        offer = PortOffer(path, [listener])
        offer.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", path
        await offer.close()


async def test_fronts_share_a_port_and_one_that_ends_refuses_nobody(held: tuple[str, Path]) -> None:
    url, path = held
    with Fronts(DEMO).start() as system:
        own = [
            await asyncio.to_thread(system.start_front, name, "--router-take-over", str(path))
            for name in ("front-0", "front-1")
        ]

        async def num_tokens() -> list[float]:
            """Tokens that each front still there has passed on."""
            found = []
            async with aiohttp.ClientSession() as session:
                for each in own:
                    async with session.get(f"{each}/metrics") as response:
                        lines = (await response.text()).splitlines()
                    [line] = [line for line in lines if line.startswith("baton_front_tokens_total ")]
                    found.append(float(line.split()[-1]))
            return found

        async with under_load(url) as load:
            while not all(await num_tokens()):
                await load.until_more(5)
            assert await asyncio.to_thread(system.kill, "front-0", signal.SIGTERM) == 0
            del own[0]
            [before] = await num_tokens()
            await load.until_more(20)
            [after] = await num_tokens()
            assert after > before
            own.append(await asyncio.to_thread(system.start_front, "front-0", "--router-take-over", str(path)))
            while not all(await num_tokens()):
                await load.until_more(5)
        assert set(load.answers) == {"200"}
