"""Bytes of KV that workers have pulled from one another's pools, by what the server's own metrics tell."""

import asyncio
import re
from collections import Counter

import aiohttp

from deploy.bench.stats import Figure

METRIC = re.compile(r'^baton_worker_pulled_bytes_total\{(?=[^}]*role="(\w+)")[^}]*\} (\S+)$', re.MULTILINE)
SETTLE_S = 1.5
"""For heartbeats to tell of what is over: three of them."""
DEADLINE_S = 10.0
NAMES = {"decode": "moved_prompts", "prefill": "moved_replies"}


class Moved:
    """Between `begin` and `end`, in all rounds together; nothing of a server that does not tell."""

    def __init__(self) -> None:
        self._bytes: Counter[str] = Counter()  # by role of who pulled them
        self._before: dict[str, float] = {}

    async def begin(self, session: aiohttp.ClientSession, url: str) -> None:
        """A round is to begin."""
        self._before = await _settled(session, url)

    async def end(self, session: aiohttp.ClientSession, url: str) -> None:
        """A round is over."""
        if self._before:
            after = await _settled(session, url)
            self._bytes.update({role: int(after.get(role, 0) - count) for role, count in self._before.items()})

    def figures(self) -> list[Figure]:
        """NaN where nothing is told."""
        nothing = float("nan")
        return [Figure(name, self._bytes.get(role, nothing) / 1e6, "MB") for role, name in NAMES.items()]


async def _settled(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """By role, when it has been told of; empty for a server that has no such metric."""
    if not await _told(session, url):
        return {}
    await asyncio.sleep(SETTLE_S)
    return await _told(session, url)


async def _told(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    try:
        async with asyncio.timeout(DEADLINE_S), session.get(f"{url}/metrics") as response:
            text = await response.text() if response.status == 200 else ""
    except (aiohttp.ClientError, OSError, TimeoutError):
        return {}
    told = METRIC.findall(text)
    return {role: sum(float(value) for of, value in told if of == role) for role, _ in told}
