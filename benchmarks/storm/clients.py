"""Clients that keep a mixed load on a system and check every answer."""

import asyncio
import json
import random
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import aiohttp
from yarl import URL

from benchmarks.storm.requests import (
    DEAD_END,
    JSON_TYPE,
    REFUSABLE,
    Answer,
    Case,
    Refusable,
    make_flood,
    make_hostile,
    make_unread,
)

LIVE_INTERVAL_S = 0.1
LEAVES_WITHIN_S, HOSTILE_LEAVES_WITHIN_S, FLOOD_LEAVES_WITHIN_S = 1.0, 5.0, 8.0
NUM_AT_ONCE = 16
"""Requests of a burst, whose clients all leave soon."""
NUM_OF_FLOOD = 96
"""Requests of a user at once: four times the rows of a batch."""
UNREAD_S = (2.0, 15.0)
UNREAD_BUFFER = 4096
"""Receive buffer of a client that does not read, in bytes."""
MAX_SHOWN = 20


class Verdicts:
    """Counts of requests by outcome, and the first faults in words."""

    def __init__(self) -> None:
        self.num = Counter[str]()  # by answered, left, unread, refused, lost, wrong
        self.slowest_s = 0.0
        self.slowest_live_s = 0.0
        self.longest_gap_s = 0.0  # between two tokens of a checked stream
        self.longest_gap_end_s = 0.0  # when it was over, by `time.monotonic`
        self.slowest_first_s = 0.0  # from a request to the first token of its stream
        self.faults: list[str] = []

    def fault(self, kind: str, what: str) -> None:
        """Count a fault and keep its text."""
        self.num[kind] += 1
        if len(self.faults) < MAX_SHOWN:
            self.faults.append(f"{time.strftime('%H:%M:%S')} {kind}: {what}")


class Clients:
    """Clients of a server.

    Args:
        deadline_s: limit for each request.
        answers: right answer of each case; empty while the answers are collected.
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
        """Send a request and return the whole answer; raises ValueError or an aiohttp error for anything else."""
        body, headers = case.body(stream=stream), {"Content-Type": JSON_TYPE}
        sent_s = time.monotonic()
        async with self._session.post(f"{self._url}/v1/completions", data=body, headers=headers) as response:
            if response.status != 200:
                raise ValueError(f"HTTP {response.status}: {(await response.text())[:300]}")
            return await (self._streamed(response, sent_s) if stream else _whole(response))

    async def keep_asking(self, seed: int, until_s: float) -> None:
        """Run a client of any kind after another, until the clock (`time.monotonic`) reaches `until_s`."""
        rng = random.Random(seed)
        cases = list(self._answers)
        kinds: list[Callable[[], Awaitable[None]]] = [
            lambda: self.check(rng.choice(cases), stream=rng.random() < 0.6),
            lambda: self._leave(rng.choice(cases), rng.uniform(0.0, LEAVES_WITHIN_S)),
            lambda: self._leave_all(rng.choices(cases, k=NUM_AT_ONCE), rng.uniform(0.0, LEAVES_WITHIN_S / 2)),
            lambda: self.be_refused(rng.choice(REFUSABLE)),
            lambda: self._leave(make_hostile(rng.getrandbits(16)), rng.uniform(0.0, HOSTILE_LEAVES_WITHIN_S)),
            lambda: self._leave_all(
                [make_flood(case) for case in rng.choices(cases, k=NUM_OF_FLOOD)],
                rng.uniform(1.0, FLOOD_LEAVES_WITHIN_S),
            ),
            lambda: self.leave_unread(make_unread(rng.getrandbits(16)), rng.uniform(*UNREAD_S)),
        ]
        while time.monotonic() < until_s:
            await rng.choices(kinds, weights=(80, 12, 2, 6, 4, 1, 2))[0]()
            await asyncio.sleep(rng.expovariate(20.0))

    async def keep_looking(self, until_s: float, deadline_s: float) -> None:
        """Check again and again that `/live` answers."""
        while time.monotonic() < until_s:
            await self.look(deadline_s)
            await asyncio.sleep(LIVE_INTERVAL_S)

    async def look(self, deadline_s: float) -> None:
        """Check once that `/live` answers."""
        sent_s = time.monotonic()
        try:
            async with asyncio.timeout(deadline_s), self._session.get(f"{self._url}/live") as response:
                response.raise_for_status()
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            self._verdicts.fault("lost", f"/live: {error!r}")
        self._verdicts.slowest_live_s = max(self._verdicts.slowest_live_s, time.monotonic() - sent_s)

    async def check(self, case: Case, *, stream: bool) -> None:
        """Send a request; the answer must be the known answer, in time."""
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
        """Close the connection in the middle of a stream; any error before, except a grammar's dead end, is a fault."""
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

    async def leave_unread(self, case: Case, after_s: float) -> None:
        """Send a request, read nothing of the answer, and close the connection."""
        url, body = URL(self._url), case.body(stream=True)
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: storm\r\nContent-Type: {JSON_TYPE}\r\nContent-Length: {len(body)}"
        )
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, UNREAD_BUFFER)
            connection.setblocking(False)
            loop = asyncio.get_running_loop()
            try:
                await loop.sock_connect(connection, (url.host, url.port))
                await loop.sock_sendall(connection, f"{head}\r\n\r\n".encode() + body)
            except OSError as error:
                self._verdicts.fault("lost", f"{case.name}: {error!r}")
                return
            await asyncio.sleep(after_s)
        self._verdicts.num["unread"] += 1

    async def be_refused(self, wrong: Refusable) -> None:
        """Send a wrong request; the server must refuse."""
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

    async def _streamed(self, response: aiohttp.ClientResponse, sent_s: float) -> Answer:
        """Follow a stream to the end; raises ValueError unless a single `[DONE]` is last."""
        answer, done, last_s = Answer(), False, 0.0
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
            now_s, verdicts = time.monotonic(), self._verdicts
            if last_s and now_s - last_s > verdicts.longest_gap_s:
                verdicts.longest_gap_s, verdicts.longest_gap_end_s = now_s - last_s, now_s
            elif not last_s:
                verdicts.slowest_first_s = max(verdicts.slowest_first_s, now_s - sent_s)
            last_s = now_s
            answer.usage = _counts(event.get("usage") or answer.usage)
        if not done:
            raise ValueError(
                f"the stream ended without [DONE], after {sum(map(len, answer.texts.values()))} characters"
            )
        return answer


async def _whole(response: aiohttp.ClientResponse) -> Answer:
    body = await response.json()
    answer = Answer(usage=_counts(body["usage"]))
    for choice in body["choices"]:
        answer.add(choice)
    return answer


def _counts(usage: Mapping[str, Any]) -> dict[str, int]:
    """Return tokens of prompt and text, without cached tokens, because caching varies."""
    return {name: count for name, count in usage.items() if name != "prompt_tokens_details"}
