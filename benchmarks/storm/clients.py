"""Clients that keep a mixed load on a system and check every answer."""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import aiohttp

from benchmarks.storm.requests import DEAD_END, JSON_TYPE, REFUSABLE, Answer, Case, Refusable, make_hostile

LIVE_INTERVAL_S = 0.1
LEAVES_WITHIN_S, HOSTILE_LEAVES_WITHIN_S = 1.0, 5.0
NUM_AT_ONCE = 16
"""Requests of a burst, whose clients all leave soon."""
MAX_SHOWN = 20


class Verdicts:
    """What became of requests, and the first of what went wrong, in words."""

    def __init__(self) -> None:
        self.num = Counter[str]()  # by answered, left, refused, lost, wrong
        self.slowest_s = 0.0
        self.slowest_live_s = 0.0
        self.faults: list[str] = []

    def fault(self, kind: str, what: str) -> None:
        """Count what must not happen."""
        self.num[kind] += 1
        if len(self.faults) < MAX_SHOWN:
            self.faults.append(f"{time.strftime('%H:%M:%S')} {kind}: {what}")


class Clients:
    """Asks one server.

    Args:
        deadline_s: by when each request must have ended.
        answers: what each case must get; empty while that is being found out.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        deadline_s: float,
        answers: Mapping[Case, Answer],
        verdicts: Verdicts,
    ) -> None:
        self._session = session
        self._url = url
        self._deadline_s = deadline_s
        self._answers = answers
        self._verdicts = verdicts

    async def ask(self, case: Case, *, stream: bool) -> Answer:
        """One request to its end; raises ValueError or an aiohttp error for anything but a whole answer."""
        body, headers = case.body(stream=stream), {"Content-Type": JSON_TYPE}
        async with self._session.post(f"{self._url}/v1/completions", data=body, headers=headers) as response:
            if response.status != 200:
                raise ValueError(f"HTTP {response.status}: {(await response.text())[:300]}")
            return await (_streamed(response) if stream else _whole(response))

    async def keep_asking(self, seed: int, until_s: float) -> None:
        """One client after the other, of every kind, until the clock (`time.monotonic`) says stop."""
        rng = random.Random(seed)
        cases = list(self._answers)
        kinds: list[Callable[[], Awaitable[None]]] = [
            lambda: self.check(rng.choice(cases), stream=rng.random() < 0.6),
            lambda: self._leave(rng.choice(cases), rng.uniform(0.0, LEAVES_WITHIN_S)),
            lambda: self._leave_all(rng.choices(cases, k=NUM_AT_ONCE), rng.uniform(0.0, LEAVES_WITHIN_S / 2)),
            lambda: self.be_refused(rng.choice(REFUSABLE)),
            lambda: self._leave(make_hostile(rng.getrandbits(16)), rng.uniform(0.0, HOSTILE_LEAVES_WITHIN_S)),
        ]
        while time.monotonic() < until_s:
            await rng.choices(kinds, weights=(80, 12, 2, 6, 4))[0]()
            await asyncio.sleep(rng.expovariate(20.0))

    async def keep_looking(self, until_s: float, deadline_s: float) -> None:
        """`/live` answers always."""
        while time.monotonic() < until_s:
            await self.look(deadline_s)
            await asyncio.sleep(LIVE_INTERVAL_S)

    async def look(self, deadline_s: float) -> None:
        """One look at `/live`."""
        sent_s = time.monotonic()
        try:
            async with asyncio.timeout(deadline_s), self._session.get(f"{self._url}/live") as response:
                response.raise_for_status()
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            self._verdicts.fault("lost", f"/live: {error!r}")
        self._verdicts.slowest_live_s = max(self._verdicts.slowest_live_s, time.monotonic() - sent_s)

    async def check(self, case: Case, *, stream: bool) -> None:
        """One request, whose answer has to be the known one, in time."""
        sent_s = time.monotonic()
        what = f"{case.name}, {'streamed' if stream else 'whole'}"
        try:
            async with asyncio.timeout(self._deadline_s):
                answer = await self.ask(case, stream=stream)
        except (TimeoutError, ValueError, KeyError, aiohttp.ClientError, OSError) as error:
            self._verdicts.fault("lost", f"{what}, after {time.monotonic() - sent_s:.1f} s: {error!r:.500}")
            return
        self._verdicts.slowest_s = max(self._verdicts.slowest_s, time.monotonic() - sent_s)
        if answer == self._answers[case]:
            self._verdicts.num["answered"] += 1
        else:
            self._verdicts.fault("wrong", f"{what}: {answer} instead of {self._answers[case]}")

    async def _leave(self, case: Case, after_s: float) -> None:
        """Close the connection in the middle; what came until then need only be no error but that of its grammar."""
        try:
            async with asyncio.timeout(after_s):
                await self.ask(case, stream=True)
        except TimeoutError:
            pass
        except (ValueError, KeyError, aiohttp.ClientError, OSError) as error:
            if DEAD_END not in str(error):
                self._verdicts.fault("lost", f"{case.name}, whose client would leave: {error!r:.500}")
                return
        self._verdicts.num["left"] += 1

    async def _leave_all(self, cases: list[Case], after_s: float) -> None:
        await asyncio.gather(*(self._leave(case, after_s) for case in cases))

    async def be_refused(self, wrong: Refusable) -> None:
        """One request that is wrong, and has to be told so."""
        headers = {"Content-Type": wrong.content_type}
        try:
            async with (
                asyncio.timeout(self._deadline_s),
                self._session.post(f"{self._url}/v1/completions", data=wrong.body, headers=headers) as response,
            ):
                status, text = response.status, await response.text()
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            self._verdicts.fault("lost", f"{wrong.body[:80]!r}: {error!r}")
            return
        if status == wrong.status and "error" in json.loads(text):
            self._verdicts.num["refused"] += 1
        else:
            self._verdicts.fault("wrong", f"{wrong.body[:80]!r}: HTTP {status} instead of {wrong.status}: {text[:300]}")


async def _whole(response: aiohttp.ClientResponse) -> Answer:
    body = await response.json()
    answer = Answer(usage=_counts(body["usage"]))
    for choice in body["choices"]:
        answer.add(choice)
    return answer


async def _streamed(response: aiohttp.ClientResponse) -> Answer:
    """Follows a stream to its end; raises ValueError unless `[DONE]` ends it, once."""
    answer, done = Answer(), False
    async for line in response.content:
        data = line.decode().removeprefix("data: ").strip()
        if not data:
            continue
        if done:
            raise ValueError(f"more after [DONE]: {data[:200]}")
        if data == "[DONE]":
            done = True
            continue
        event = json.loads(data)
        if "error" in event:
            raise ValueError(f"the stream ends with an error: {event['error']}")
        for choice in event["choices"]:
            answer.add(choice)
        answer.usage = _counts(event.get("usage") or answer.usage)
    if not done:
        raise ValueError(f"the stream ended without [DONE], after {sum(map(len, answer.texts.values()))} characters")
    return answer


def _counts(usage: Mapping[str, Any]) -> dict[str, int]:
    """Tokens of prompt and text; how many were cached differs from time to time."""
    return {name: count for name, count in usage.items() if name != "prompt_tokens_details"}
