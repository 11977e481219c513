"""The router's end of a reading process: a queue, read body by body; started on first need.

A body may end the process, by memory use or a library's bug. Only the request of the body fails, and the next body gets
a new process.
"""

import asyncio
import logging
from asyncio.subprocess import Process
from collections import deque
from dataclasses import dataclass

from common.base.errors import RequestError
from router.base.helper_frames import BODY, CONVERSATIONS, REPLY, Kind
from router.base.helper_process import HelperProcess
from router.reading.packed_requests import unpack, unpack_answer
from router.requests.completion_api import CompletionRequest
from router.text.chat_template import template_error
from router.text.text_cache import TextCounts

logger = logging.getLogger(__name__)

DEADLINE_S = 60.0
"""Far above the largest body's time."""


@dataclass(slots=True, eq=False)
class Job:
    """A body waiting to be read."""

    kind: Kind
    pieces: list[bytes]
    max_model_len: int
    reply: "asyncio.Future[bytes]"


class ReaderProcess:
    """Handle of `router.reading.reader_main` or `router.reading.template_main`, restarted after an end."""

    def __init__(self, helper: HelperProcess, deadline_s: float = DEADLINE_S) -> None:
        self._helper = helper
        self._deadline_s = deadline_s
        self._jobs: asyncio.Queue[Job] = asyncio.Queue()
        self._worker: asyncio.Task[None] | None = None
        self.text_counts = TextCounts()

    async def read(self, pieces: list[bytes], max_model_len: int, kind: Kind = Kind.COMPLETION) -> CompletionRequest:
        """Return the request made by the process from a body; empties `pieces`.

        Raises the process's RequestError, or a RequestError for a body that ended the process.
        """
        return unpack(await self._reply(kind, pieces, max_model_len))

    async def answer(self, kind: Kind, pieces: list[bytes], max_model_len: int) -> bytes:
        """Return the process's answer to a body; otherwise like `read`."""
        return unpack_answer(await self._reply(kind, pieces, max_model_len))

    async def _reply(self, kind: Kind, pieces: list[bytes], max_model_len: int) -> bytes:
        if self._worker is None:
            self._worker = asyncio.create_task(self._work())
        job = Job(kind, pieces, max_model_len, asyncio.get_running_loop().create_future())
        self._jobs.put_nowait(job)
        return await job.reply

    async def close(self) -> None:
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.gather(self._worker, return_exceptions=True)
        await self._helper.end()

    async def _work(self) -> None:
        while True:
            job = await self._jobs.get()
            if job.reply.cancelled():
                continue  # the caller has left
            num_bytes = sum(map(len, job.pieces))
            try:
                async with asyncio.timeout(self._deadline_s):
                    reply, counts = await _exchange(await self._helper.running(), job)
            except (OSError, EOFError, TimeoutError) as error:
                status = await self._helper.end()
                logger.error(
                    "reading a body of %d bytes ended its process: %r, exit status %s", num_bytes, error, status
                )
                if not job.reply.done():
                    job.reply.set_exception(_ended(job.kind, num_bytes))
            else:
                self.text_counts += counts
                if not job.reply.done():
                    job.reply.set_result(reply)


def _ended(kind: Kind, num_bytes: int) -> RequestError:
    """Return the error for a body that ended the process."""
    if kind in CONVERSATIONS:
        return template_error(f"{num_bytes} bytes took it too long, or too much memory")
    message = f"a body of {num_bytes} bytes could not be read; send a smaller one"
    return RequestError(message, code="request_too_large", status=413)


async def _exchange(process: Process, job: Job) -> tuple[bytes, TextCounts]:
    assert process.stdin is not None and process.stdout is not None
    pieces = deque(job.pieces)
    job.pieces.clear()
    process.stdin.write(BODY.pack(job.kind, sum(map(len, pieces)), job.max_model_len))
    while pieces:  # sent in full even if the caller has left, because the process waits for all
        process.stdin.write(pieces.popleft())
        await process.stdin.drain()
    num_bytes, *counts = REPLY.unpack(await process.stdout.readexactly(REPLY.size))
    return await process.stdout.readexactly(num_bytes), TextCounts(*counts)
