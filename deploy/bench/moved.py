"""Bytes of KV pulled by workers from other workers' pools, by the server's own metrics."""

import asyncio
import re
from collections import Counter

import aiohttp

from deploy.bench.stats import Figure

METRIC = re.compile(r'^baton_worker_pulled_bytes_total\{(?=[^}]*role="(\w+)")[^}]*\} (\S+)$', re.MULTILINE)
SETTLE_S = 1.5
"""Time for heartbeats to report a round's end: three heartbeats."""
DEADLINE_S = 10.0
NAMES = {"decode": "moved_prompts", "prefill": "moved_replies"}


class Moved:
    """Bytes pulled between `begin` and `end`, in all rounds together; empty for a server without the metric."""

    def __init__(self) -> None:
        self._bytes: Counter[str] = Counter()  # by role of the pulling worker
        self._before: dict[str, float] = {}

    async def begin(self, session: aiohttp.ClientSession, url: str) -> None:
        """Read the counters before a round."""
        self._before = await _settled(session, url)

    async def end(self, session: aiohttp.ClientSession, url: str) -> None:
        """Add the bytes of a round."""
        if self._before:
            after = await _settled(session, url)
            self._bytes.update({role: int(after.get(role, 0) - count) for role, count in self._before.items()})

    def figures(self) -> list[Figure]:
        """Return megabytes by direction; NaN without the metric."""
        nothing = float("nan")
        return [Figure(name, self._bytes.get(role, nothing) / 1e6, "MB") for role, name in NAMES.items()]


async def _settled(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """Return bytes by role after the last heartbeats; empty for a server without the metric."""
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
