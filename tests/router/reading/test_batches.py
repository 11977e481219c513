"""Jobs in threads: each waiter gets its own result or error, whoever comes when."""

import asyncio
import threading
from collections.abc import Callable, Iterator

import pytest

from router.reading.batches import MAX_BATCH_CHARS, Batches


@pytest.fixture(params=[1, 3])
def batches(request: pytest.FixtureRequest) -> Iterator[Batches]:
    made = Batches(request.param)
    yield made
    made.close()


def job(number: int) -> Callable[[], int]:
    def work() -> int:
        if number % 7 == 3:
            raise ValueError(number)
        return number

    return work


async def test_each_waiter_gets_its_own_result_or_error(batches: Batches) -> None:
    async def ask(number: int) -> None:
        for _ in range(number % 5):
            await asyncio.sleep(0)  # so that jobs come also while a thread ends
        try:
            assert await batches.run(job(number), number % 3 * MAX_BATCH_CHARS // 2) == number
        except ValueError as error:
            assert error.args == (number,) and number % 7 == 3

    for _ in range(20):
        async with asyncio.timeout(60):
            await asyncio.gather(*map(ask, range(50)))


async def test_a_waiter_that_leaves_harms_no_other(batches: Batches) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        assert may_end.wait(60)

    leaving = [asyncio.create_task(batches.run(wait, 1)) for _ in range(5)]
    staying = [asyncio.create_task(batches.run(job(number), 1)) for number in range(3)]
    await asyncio.to_thread(begun.wait, 60)
    for task in leaving:
        task.cancel()
    may_end.set()
    async with asyncio.timeout(60):
        assert await asyncio.gather(*staying) == [0, 1, 2]


async def test_waiting_jobs_come_back_together_up_to_a_limit_of_characters() -> None:
    batches, may_begin, ended = Batches(1), threading.Event(), list[int]()

    async def ask(number: int) -> int:
        await batches.run(lambda: ended.append(number), MAX_BATCH_CHARS // 4)
        return len(ended)

    first = asyncio.create_task(batches.run(lambda: may_begin.wait(60), 1))
    await asyncio.sleep(0)
    others = [asyncio.create_task(ask(number)) for number in range(8)]
    await asyncio.sleep(0)
    assert batches._num_idle == 0 and not ended
    may_begin.set()
    async with asyncio.timeout(60):
        num_ended = await asyncio.gather(*others)
    await first
    batches.close()
    assert ended == list(range(8)), "in order"
    assert num_ended[:4] == [num_ended[0]] * 4 and num_ended[0] >= 4, "the first waits for its batch alone"
