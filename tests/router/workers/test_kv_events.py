"""What memory servers tell of their blocks, and what the router makes of what it missed."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from common.settings.config import NetSection
from common.wire.messages.memory_reports import BlockEvent, KVEvents, MemoryReady
from common.wire.messages.worker import KVEventsWanted, Message, Role
from common.wire.values.packing import pack_ids
from router.placement.predictions import MOMENT_S, PoolName, Prediction
from router.placement.worker_pool import WorkerPool
from router.workers import kv_events
from router.workers.hub import Links
from router.workers.kv_events import ASK_S, SUSPENDED_S, KVEventReader
from router.workers.memory_servers import MemoryServers
from tests.support.layouts import window
from tests.support.messages import LAYOUT, worker_ready

NET = NetSection(heartbeat_s=0.5, worker_timeout_s=3.0)
NUM_BLOCKS = 20
HERE, THERE = ("memory-0", 10), ("memory-1", 11)


class Rig:
    """A router's part that hears of blocks; its clock is moved by hand, its servers are those that are named."""

    def __init__(self, *, is_on: bool = True) -> None:
        self.now_s = 100.0
        self.sent: list[tuple[bytes, Message]] = []
        self.pool = WorkerPool(NET, 2.0, self.clock)
        self.servers = MemoryServers(Links(NET, 1, self.send, self.clock))
        self.reader = KVEventReader(NET, self.pool, self.servers, self.send, self.clock, is_on=is_on)

    def clock(self) -> float:
        return self.now_s

    def send(self, connection: bytes, message: Message) -> bool:
        self.sent.append((connection, message))
        return True

    def join(self, pool: PoolName, role: Role = Role.PREFILL, epoch: int = 1, **fields: Any) -> None:
        """A worker that has blocks of a pool."""
        server_id, pool_id = pool
        worker_id = fields.pop("worker_id", f"{role.name}-{server_id}-{pool_id}")
        ready = worker_ready(
            worker_id, role, memory_server_id=server_id, memory_server_epoch=epoch, pool_id=pool_id,
            **{"num_blocks": (NUM_BLOCKS,)} | fields,
        )  # fmt: skip
        self.pool.add(ready, self.now_s)
        self.reader.check()

    def register(self, server_id: str, epoch: int = 1) -> None:
        self.servers.on_ready(b"", MemoryReady(server_id, epoch, 1, "1", "cpu"))
        self.reader.check()

    def asked(self) -> list[int]:
        """Ids of pools that were asked for since it was last looked at."""
        asked = [message.pool_id for _, message in self.sent if isinstance(message, KVEventsWanted)]
        self.sent.clear()
        return asked

    def tell(self, sequence: int, *runs: Sequence[int], pool: PoolName = HERE, epoch: int = 1) -> None:
        """Runs of blocks that were sealed and gone, in turn."""
        kinds = [BlockEvent.GONE if number % 2 else BlockEvent.SEALED for number in range(len(runs))]
        self.tell_kinds(sequence, *zip(kinds, runs, strict=True), pool=pool, epoch=epoch)

    def tell_kinds(
        self,
        sequence: int,
        *runs: tuple[BlockEvent, Sequence[int]],
        pool: PoolName = HERE,
        epoch: int = 1,
        copy_us: int = 0,
    ) -> None:
        """Runs of whatever was."""
        kinds, lengths = bytes(kind for kind, _ in runs), pack_ids(len(run) for _, run in runs)
        keys = b"".join(key.to_bytes(8, "little") for _, run in runs for key in run)
        self.reader.on_events(b"", KVEvents(pool[0], epoch, pool[1], sequence, kinds, lengths, keys, copy_us))

    def known(self, pool: PoolName = HERE) -> set[int] | None:
        """What is told to be there; None if nobody tells."""
        contents = self.pool.prefixes.contents(pool)
        return contents.reported if contents.is_reported else None


@pytest.fixture
def rig() -> Rig:
    """Two pools that were asked for."""
    rig = Rig()
    for pool in (HERE, THERE):
        rig.register(pool[0])
        rig.join(pool)
    assert rig.asked() == [10, 11]
    return rig


def test_what_is_told_in_order_is_known(rig: Rig) -> None:
    rig.tell(0, [1, 2, 3])
    rig.tell(1, [], [2], [4, 5], [1, 4])
    rig.tell(2)
    assert (rig.known(), rig.known(THERE)) == ({3, 5}, None)
    rig.tell(0, [9], pool=THERE)
    rig.tell(3, [6, 7], [6])
    assert (rig.known(), rig.known(THERE)) == ({3, 5, 7}, {9})
    rig.tell(0, [1])
    assert rig.known() == {1}, "it was told from the beginning"


def test_with_one_pool_nobody_is_asked_and_with_another_both_are() -> None:
    rig = Rig()
    rig.register("memory-0")
    rig.join(HERE)
    rig.join(HERE, Role.DECODE)
    assert rig.asked() == []
    rig.tell(0, [1])
    assert rig.known() is None
    rig.register("memory-1")
    rig.join(THERE, Role.DECODE)
    assert rig.asked() == [10, 11], "it makes a difference who decodes"


def test_who_is_not_registered_or_has_nothing_to_tell_is_not_asked() -> None:
    rig = Rig()
    rig.join(HERE)
    rig.join(THERE)
    rig.join(("memory-2", 12), kv_layout=type(LAYOUT)("model", (window(16, 64), window(8, 64))))
    rig.register("memory-2")
    rig.register("memory-1", epoch=2)
    assert rig.asked() == []
    rig.register("memory-0")
    assert rig.asked() == [10]


def test_where_it_is_off_nobody_is_asked() -> None:
    rig = Rig(is_on=False)
    for pool in (HERE, THERE):
        rig.register(pool[0])
        rig.join(pool)
    rig.tell(0, [1])
    assert rig.asked() == [] and rig.known() is None


def test_what_is_parked_is_known_until_it_is_gone_or_something_is_missing(rig: Rig) -> None:
    rig.tell_kinds(0, (BlockEvent.SEALED, [1, 2, 3]), (BlockEvent.PARKED, [4, 5]), copy_us=30)
    rig.tell_kinds(1, (BlockEvent.PARKED, [2, 3]), (BlockEvent.SEALED, [4]), (BlockEvent.GONE, [3, 5]), copy_us=40)
    contents = rig.pool.prefixes.contents(HERE)
    assert (contents.reported, contents.parked, contents.copy_us) == ({1, 4}, {2}, 40)
    assert contents.find([1, 2, 4, 3], rig.now_s)[:4] == (1, 2, 1, 40)
    assert rig.pool.prefixes.reported_by("memory-0") == (2, 1)
    rig.now_s += 2 * ASK_S
    rig.tell_kinds(3, (BlockEvent.PARKED, [9]))
    assert 10 in rig.asked() and contents.find([1, 2], rig.now_s)[:4] == (0, 0, 0, 0)
    rig.tell_kinds(0, (BlockEvent.PARKED, [2]), copy_us=50)
    assert contents.find([2, 1], rig.now_s)[:4] == (0, 1, 1, 50), "it was told anew"
    rig.tell_kinds(1, (BlockEvent.PARKED, range(100, 100 + 3 * NUM_BLOCKS)))
    assert len(contents.parked) == 1 + 3 * NUM_BLOCKS, "of those there may be more than in the pool"


@pytest.mark.parametrize("sequence", [1, 3, 1 << 62])
def test_after_a_gap_nothing_is_known_until_it_is_told_anew(rig: Rig, sequence: int) -> None:
    rig.now_s += 2 * ASK_S
    rig.tell(0, [], pool=THERE)
    rig.tell(0, [1, 2])
    rig.tell(1, [3])
    rig.tell(sequence, [4])  # twice the same, or one that is missing
    assert rig.known() is None and rig.asked() == [10]
    rig.tell(sequence + 1, [5])
    assert rig.known() is None, "it was said before it was asked"
    rig.tell(0, [7])
    assert rig.known() == {7}


def test_it_is_asked_again_once_a_second_until_it_tells(rig: Rig) -> None:
    for _ in range(32):
        rig.now_s += ASK_S / 10
        rig.reader.check()
    assert 4 <= len(rig.asked()) <= 6, "two pools, two or three times"
    rig.tell(0, [1])
    rig.tell(5, [2])
    rig.tell(0, [3])
    assert rig.known() is None, "who has not been asked again has nothing to say"
    rig.now_s += 1.1 * ASK_S
    rig.reader.check()
    assert 10 in rig.asked()
    rig.tell(0, [4])
    assert rig.known() == {4}


def test_who_is_silent_tells_nothing(rig: Rig) -> None:
    rig.tell(0, [1])
    rig.now_s += 0.9 * NET.worker_timeout_s
    rig.tell(1)
    rig.now_s += 0.9 * NET.worker_timeout_s
    rig.reader.check()
    assert rig.known() == {1}
    rig.asked()
    rig.now_s += 0.2 * NET.worker_timeout_s
    rig.reader.check()
    assert rig.known() is None and 10 in rig.asked()


def test_what_a_lost_server_had_is_gone_at_once_and_the_next_one_begins_anew(rig: Rig) -> None:
    rig.tell(0, [1, 2])
    prediction = rig.pool.prefixes.predict(HERE, [1, 2, 3])
    assert rig.pool.prefixes.find(HERE, [1, 2, 3]).num_there == 3
    rig.servers.on_unreachable([(b"memory-0.1", KVEventsWanted(0))])
    rig.reader.check()
    assert rig.known() is None and rig.pool.prefixes.find(HERE, [1, 2, 3]).num_there == 0
    rig.tell(1, [3])
    rig.pool.prefixes.end(prediction)
    assert rig.known() is None
    rig.register("memory-0", epoch=2)
    assert rig.asked() == [], "its workers have another one"
    rig.join(("memory-0", 13), epoch=2)
    assert rig.asked() == [13]
    rig.tell(0, [5], pool=("memory-0", 13), epoch=2)
    assert rig.known(("memory-0", 13)) == {5}


def test_a_server_that_was_taken_for_lost_is_asked_again(rig: Rig) -> None:
    rig.tell(0, [1, 2])
    rig.servers.on_unreachable([(b"memory-0.1", KVEventsWanted(0))])
    rig.reader.check()
    rig.register("memory-0")
    assert rig.asked() == [10] and rig.known() is None
    rig.tell(1, [3])
    rig.tell(0, [1])
    assert rig.known() == {1}


def test_a_pool_that_lost_its_workers_between_two_checks_begins_anew(rig: Rig) -> None:
    rig.tell(0, [1])
    [worker] = [worker for worker in rig.pool if worker.pool == HERE]
    rig.pool.remove(worker)
    rig.pool.add(worker.ready, rig.now_s)
    rig.tell(1, [2])
    assert rig.known() is None
    rig.reader.check()
    assert rig.asked() == [10]


def test_only_the_server_itself_tells_of_its_pools(rig: Rig) -> None:
    rig.tell(0, [1], epoch=2)
    rig.tell(0, [1], pool=("memory-1", 10))
    rig.tell(0, [1], pool=("memory-2", 10))
    rig.tell(0, [1], pool=("memory-0", 12))
    assert rig.known() is None and rig.known(THERE) is None


def test_more_blocks_than_there_are_are_not_believed(rig: Rig) -> None:
    rig.tell(0, range(NUM_BLOCKS))
    rig.tell(1, range(NUM_BLOCKS))
    assert rig.known() == {*range(NUM_BLOCKS)}
    rig.tell(2, range(100, 102), [0])
    assert rig.known() is None
    rig.now_s += 0.9 * SUSPENDED_S
    rig.tell(0, [1])
    rig.reader.check()
    assert rig.known() is None and 10 not in rig.asked()
    rig.now_s += 0.2 * SUSPENDED_S
    rig.reader.check()
    assert 10 in rig.asked()


OTHERS = [(f"memory-{number}", 10 + number) for number in range(2, 6)]


def test_a_liar_takes_no_room_from_others(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """With parked blocks without end, in two pools, just below the limit or beyond it: its own telling pays."""
    monkeypatch.setattr(kv_events, "MAX_REPORTED", 100)
    liar, also_liar = ("liar", 77), ("liar", 78)
    rig.register("liar")
    for pool in (liar, also_liar, *OTHERS):
        rig.register(pool[0])
        rig.join(pool)
    for pool in (HERE, liar, also_liar):
        rig.tell(0, [], pool=pool)
    for number in range(49):
        for pool in (liar, also_liar):
            rig.tell_kinds(1 + number, (BlockEvent.PARKED, [1000 + number]), pool=pool)
    assert rig.known(liar) is not None and rig.pool.prefixes.num_reported == 98
    rig.asked()
    rig.tell(1, range(14))  # a seventh of the limit, as there are seven servers
    assert rig.known() == {*range(14)}
    assert rig.known(liar) is rig.known(also_liar) is None and rig.pool.prefixes.num_reported == 14
    for pool in OTHERS:
        rig.tell(0, range(14), pool=pool)
        assert rig.known(pool) == {*range(14)}
    rig.now_s += 0.9 * SUSPENDED_S
    for sequence in (0, 50, 51):
        rig.tell_kinds(sequence, (BlockEvent.PARKED, range(200)), pool=liar)
    rig.reader.check()
    assert rig.pool.prefixes.num_reported == 0, "all others were silent for long"
    assert rig.known(liar) is None and not {77, 78} & {*rig.asked()}
    rig.now_s += 0.2 * SUSPENDED_S
    rig.reader.check()
    assert {77, 78} <= {*rig.asked()}


def test_of_two_that_tell_as_much_the_latest_makes_room(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "MAX_REPORTED", 15)
    rig.tell(0, range(10))
    rig.tell(0, range(10), pool=THERE)
    assert rig.known() == {*range(10)} and rig.known(THERE) is None


def test_who_begins_anew_without_end_costs_no_more_than_what_it_says(rig: Rig) -> None:
    """Nothing is gone through at each beginning; what was predicted is there or forgotten as ever."""
    prefixes = rig.pool.prefixes
    rig.tell(0)
    predictions = [prefixes.predict(HERE, [number]) for number in range(NUM_BLOCKS)]
    contents = prefixes.contents(HERE)
    contents._predictions._all = Unlooked(contents._predictions._all)
    for _ in range(100):
        rig.tell(0, [0])
    prefixes.end(predictions[1])
    rig.tell(0, [0])
    assert [prefixes.find(HERE, [number]).num_there for number in range(3)] == [1, 1, 1]
    rig.now_s += 1.1 * MOMENT_S
    assert [prefixes.find(HERE, [number]).num_there for number in range(3)] == [1, 0, 1]


class Unlooked(OrderedDict[Prediction, None]):
    """Of which nobody asks what all there is."""

    def __iter__(self) -> Iterator[Prediction]:
        raise AssertionError("all of them are looked at")


def test_a_worker_that_says_its_pool_is_tiny_has_nobody_s_telling_refused(rig: Rig) -> None:
    rig.join(("memory-9", 9), num_blocks=(1,), worker_id="forger")
    rig.join(("memory-9", 9))
    rig.register("memory-9")
    rig.tell(0, range(NUM_BLOCKS), pool=("memory-9", 9))
    assert rig.known(("memory-9", 9)) == {*range(NUM_BLOCKS)}


FORGED_SERVERS = ["memory-0", "memory-1", "stranger"]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(FORGED_SERVERS),
            st.sampled_from([0, 1, 2]),
            st.sampled_from([10, 11, 12]),
            st.sampled_from([0, 0, 1, 2, 3, 1 << 62]),
            st.lists(st.tuples(st.sampled_from(BlockEvent), st.lists(st.integers(0, 40), max_size=30)), max_size=3),
            st.sampled_from([0.0, 0.3 * ASK_S, 1.1 * ASK_S]),
        ),
        max_size=30,
    )
)
@example([("memory-1", 1, 11, 0, [(BlockEvent.PARKED, [*range(40)])], 0.0)] + [("stranger", 1, 11, 0, [], 0.0)] * 20)
def test_whatever_one_forges_another_s_telling_stands(
    forged: list[tuple[str, int, int, int, list[tuple[BlockEvent, list[int]]], float]],
) -> None:
    """Wrong pools, gaps, old incarnations, what was never stored: nobody but who says it is at a loss."""
    rig = Rig()
    for pool in (HERE, THERE):
        rig.register(pool[0])
        rig.join(pool)
    begun_s = rig.now_s
    with patch.object(kv_events, "MAX_REPORTED", 45):
        rig.tell(0, range(5))
        for sequence, (server_id, epoch, pool_id, number, runs, wait_s) in enumerate(forged, 1):
            rig.now_s += wait_s
            if (server_id, epoch) != ("memory-0", 1):  # in whose name nobody else speaks: the hub drops it
                rig.tell_kinds(number, *runs, pool=(server_id, pool_id), epoch=epoch)
            newest = min(4 + sequence, NUM_BLOCKS - 1)
            rig.tell(sequence, [newest], [50])
            rig.reader.check()
            assert rig.known() == {*range(newest + 1)}
            assert rig.pool.prefixes.num_reported <= 45
    assert len(rig.asked()) <= 2 + (rig.now_s - begun_s) / ASK_S, "who tells of gaps is asked once a second"


def test_while_it_makes_no_difference_for_a_while_what_is_told_still_counts(rig: Rig) -> None:
    rig.tell(0, [1])
    [there] = [worker for worker in rig.pool if worker.pool == THERE]
    rig.pool.remove(there)
    rig.reader.check()
    rig.tell(1, [2])
    assert rig.known() == {1, 2} and rig.asked() == []
    rig.join(THERE)
    assert rig.asked() == [11]
