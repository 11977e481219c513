"""What is told of blocks that come and go, from the question on: all of it, in order, some at a time."""

from collections.abc import Iterator

import numpy as np
import pytest

from common.memory.blocks import event_log
from common.memory.blocks.event_log import EventLog
from common.memory.blocks.index import BlockIndex
from common.wire.messages.memory_reports import BlockEvent
from common.wire.values.block_key import KEY
from common.wire.values.packing import unpack_ids
from common.wire.values.pool_shape import PoolShape
from tests.support.layouts import one_group

MOST = 4
"""Keys of a message here."""
KEYS = [bytes([number]) * 16 for number in range(1, 30)]
WRITER = 0


@pytest.fixture(autouse=True)
def few_keys(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(event_log, "MAX_EVENT_KEYS", MOST)
    yield


@pytest.fixture
def index() -> BlockIndex:
    return BlockIndex(PoolShape(one_group("model", 1, 1, 1, 1, "float16"), (13,)))


def seal(index: BlockIndex, keys: list[bytes]) -> None:
    """Blocks are sealed under these, and nobody reads them any more."""
    block_ids = index.lease(WRITER, (len(keys),))
    index.seal(WRITER, block_ids, index.leases.generation[block_ids], b"".join(keys))
    index.free(WRITER, block_ids, index.leases.generation[block_ids])


def evict(index: BlockIndex, count: int) -> None:
    """As who wants so many blocks does."""
    block_ids = index.lease(WRITER, (count,))
    index.free(WRITER, block_ids, index.leases.generation[block_ids])


def told(log: EventLog) -> tuple[int, list[tuple[BlockEvent, list[int]]]]:
    """Sequence, and runs of keys by their first byte."""
    sequence, kinds, lengths, packed, _ = log.take()
    assert len(packed) <= MOST * 8
    keys, runs = [packed[begin] for begin in range(0, len(packed), 8)], []
    for kind, length in zip(kinds, unpack_ids(lengths), strict=True):
        runs.append((BlockEvent(kind), keys[:length]))
        keys = keys[length:]
    assert not keys
    return sequence, [run for run in runs if run[1]]


class Heard:
    """What is where, for who hears all that a log tells."""

    def __init__(self) -> None:
        self.there, self.parked = set[int](), set[int]()

    def hear(self, log: EventLog) -> None:
        """One message."""
        for kind, keys in told(log)[1]:
            self.there -= set(keys)
            self.parked -= set(keys)
            if kind is not BlockEvent.GONE:
                (self.there if kind is BlockEvent.SEALED else self.parked).update(keys)


def all_told(log: EventLog) -> set[int]:
    """What is there, for who hears all of it."""
    heard = Heard()
    while log.has_news:
        heard.hear(log)
    return heard.there


def test_nothing_is_kept_until_somebody_asks_and_nothing_once_nobody_listens(index: BlockIndex) -> None:
    log = index.sealed.log
    seal(index, KEYS[:3])
    evict(index, 12)
    assert not log.has_news and not log._runs
    log.begin()
    seal(index, KEYS[3:5])
    log.stop()
    seal(index, KEYS[5:7])
    assert not log.has_news and not log._runs


def test_all_that_is_there_comes_first_and_then_what_happens(index: BlockIndex) -> None:
    log = index.sealed.log
    seal(index, KEYS[:6])
    log.begin()
    assert log.has_news
    messages = [told(log) for _ in range(4)]  # of four block ids each
    assert [sequence for sequence, _ in messages] == [0, 1, 2, 3]
    assert {key for _, runs in messages for _, keys in runs for key in keys} == {1, 2, 3, 4, 5, 6}
    assert not log.has_news
    seal(index, KEYS[6:8])
    seal(index, KEYS[:2])  # of keys that are there
    evict(index, 10)
    sequence, runs = told(log)
    assert sequence == 4 and runs[0] == (BlockEvent.SEALED, [7, 8])
    assert runs[1][0] is BlockEvent.GONE and set(runs[1][1]) < {1, 2, 3, 4, 5, 6}
    assert log.has_news, "there are more than one message tells"


def test_nothing_is_told_where_nothing_has_happened(index: BlockIndex) -> None:
    log = index.sealed.log
    seal(index, KEYS[:12])
    log.begin()
    all_told(log)
    evict(index, 2)
    assert [(kind, len(keys)) for kind, keys in told(log)[1]] == [(BlockEvent.GONE, 2)]
    assert log.take()[1:] == (b"", b"", b"", 0)


@pytest.mark.parametrize("num_messages", range(6))
def test_what_happens_while_all_is_told_counts(index: BlockIndex, num_messages: int) -> None:
    log = index.sealed.log
    seal(index, KEYS[:9])
    log.begin()
    heard = Heard()
    for _ in range(num_messages):
        heard.hear(log)
    evict(index, 6)  # of which three are at its end
    seal(index, [KEYS[8], KEYS[20]])
    while log.has_news:
        heard.hear(log)
    assert heard.there == {key[0] for key in index.sealed.block_of}


def test_more_than_there_are_blocks_is_void_and_told_anew_when_asked(index: BlockIndex) -> None:
    log = index.sealed.log
    log.begin()
    all_told(log)
    for number in range(20):
        seal(index, [KEYS[number]])
    assert log._num_pending <= 13
    assert log.has_news and told(log) == (5, []), "a number is left out"
    log.begin()
    assert all_told(log) == {key[0] for key in index.sealed.block_of}


def test_of_a_pool_that_is_void_nothing_is_there_whatever_happens(index: BlockIndex) -> None:
    log = index.sealed.log
    seal(index, KEYS[:3])
    log.begin()
    told(log)
    log.void()
    seal(index, KEYS[3:6])
    assert told(log) == (2, []), "a number is left out"
    log.begin()
    assert told(log) == (0, []) and not log.has_news


def test_keys_are_cut_short() -> None:
    log = EventLog(2, lambda begin, end: np.zeros(0, KEY))
    log.begin()
    log.take()
    log.add(BlockEvent.SEALED, np.frombuffer(bytes(range(32)), KEY))
    assert log.take().keys == bytes([*range(8), *range(16, 24)])
