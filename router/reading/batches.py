"""Threads that do short jobs batch by batch, so that jobs which arrive together cost the event loop few wake-ups."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

MAX_BATCH_CHARS = 8192
"""Characters of a batch's jobs together, because the first waits for the last; a longer job is a batch by itself."""

Result = TypeVar("Result")


@dataclass(slots=True, eq=False)
class _Job:
    work: Callable[[], Any]
    num_chars: int
    future: asyncio.Future[Any]
    result: Any = None
    error: Exception | None = None

    def run(self) -> None:
        try:
            self.result = self.work()
        except Exception as error:  # noqa: BLE001 - raised again where the job is awaited
            self.error = error

    def settle(self) -> None:
        if self.future.done():
            return  # nobody waits any more
        if self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(self.result)


class Batches:
    """A few threads and the jobs that wait for them; use on the event loop."""

    def __init__(self, num_threads: int) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenizer")
        self._num_idle = num_threads
        self._waiting: deque[_Job] = deque()

    async def run(self, work: Callable[[], Result], num_chars: int) -> Result:
        """Return the result of `work` done in a thread, or raise its error."""
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Job(work, num_chars, future))
        self._start()
        return await future

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _start(self) -> None:
        if self._num_idle and self._waiting:
            self._num_idle -= 1
            self._threads.submit(self._work, asyncio.get_running_loop())

    def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        """Do waiting jobs in a thread until none is left."""
        while batch := list(self._taken()):
            for job in batch:
                job.run()
            loop.call_soon_threadsafe(_settle, batch)
        loop.call_soon_threadsafe(self._end)

    def _taken(self) -> Iterator[_Job]:
        num_chars = 0
        while self._waiting and num_chars < MAX_BATCH_CHARS:
            try:
                job = self._waiting.popleft()
            except IndexError:  # another thread was faster
                return
            num_chars += job.num_chars
            yield job

    def _end(self) -> None:
        """Count a thread as idle, and start it again for jobs that came while it ended."""
        self._num_idle += 1
        self._start()


def _settle(batch: list[_Job]) -> None:
    for job in batch:
        job.settle()
