"""Streams that run while something is measured, and the exit code of such a benchmark."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager

import uvloop
from rich.console import Console

from deploy.bench.client import Target
from deploy.bench.stats import RequestRecord
from deploy.bench.workload import Prompt

LOOK_S = 0.02


@asynccontextmanager
async def streaming(target: Target, prompts: Sequence[Prompt], deadline_s: float) -> AsyncIterator[list[RequestRecord]]:
    """Yield records of streams that have all begun and run until the block's end.

    Raises RuntimeError if a stream ends early, and TimeoutError if some stream has not begun after `deadline_s`.
    """
    records = [RequestRecord(sent_s=time.perf_counter()) for _ in prompts]
    bodies = target.prepare(prompts)
    tasks = [asyncio.create_task(target.complete(*each)) for each in zip(prompts, bodies, records, strict=True)]
    try:
        async with asyncio.timeout(deadline_s):
            while not all(record.chunk_times_s for record in records):
                _check_running(tasks)
                await asyncio.sleep(LOOK_S)
        yield records
        _check_running(tasks)
    finally:
        for task in tasks:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)


def _check_running(tasks: Sequence[asyncio.Task[RequestRecord]]) -> None:
    for task in tasks:
        if task.done():
            raise RuntimeError(f"a stream ended early: {task.result().error or 'its tokens were too few'}")


def exit_code(work: Coroutine[object, object, None], console: Console, *, late: str) -> int:
    """Run `work`; return 1 after printing a RuntimeError's reason, or `late` for a timeout."""
    try:
        uvloop.run(work)
    except (RuntimeError, TimeoutError) as error:
        console.print(str(error) or late, style="red", markup=False)
        return 1
    return 0
