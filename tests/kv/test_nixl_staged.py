"""Staged reads of a visit over a fake agent in this process: its thread, its failures, and the order of its end."""

import ctypes
import dataclasses
import mmap
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from typing import cast

import numpy as np
import pytest
import torch

from common.base.errors import MemoryLost
from common.kv.nixl_staged import StagedReads
from common.kv.pool import KVPool
from common.memory.base.nixl_agent import Agent, AgentError
from common.memory.base.slots import Slots
from common.memory.client.peer_pool_client import LentClaim, PeerPoolClient
from common.memory.client.stager import Stager
from common.memory.devices.host_backing import HostBacking
from common.memory.server.pools import make_pool
from common.memory.server.staging import Stagings
from common.wire.messages.staging import BlocksStaged, BlocksStaging, StagingWanted
from common.wire.values.packing import pack_ids
from common.wire.values.pool_shape import PoolShape
from tests.kv.peer_process import BLOCK_BYTES, LAYOUT
from tests.memory.server.test_server import eventually

PEER, NUM_BLOCKS, CANARY = 3, 40, 0xCD
SLOTS = Slots(3, 2 * BLOCK_BYTES)
LATE_S = 0.2


class FakeAgent:
    """Reads memory of this process; the bytes of a read move when it is asked for, or at `destroy` at the latest."""

    def __init__(self) -> None:
        self.reads: dict[int, tuple[int, int, int]] = {}
        self.num_registered = self.num_read = 0
        self.fails_after = self.stalls_after = 1 << 30

    def register(self, address: int, num_bytes: int) -> None:
        self.num_registered += num_bytes

    def meet(self, metadata: bytes) -> str:
        return "lender"

    def read_range(self, ours: int, peer: str, theirs: int, num_bytes: int) -> int:
        handle = secrets.randbits(60)
        self.reads[handle] = ours, theirs, num_bytes
        return handle

    def is_read(self, handle: int) -> bool:
        if self.num_read >= self.fails_after:
            raise AgentError("the peer is gone")
        if self.num_read >= self.stalls_after:
            return False
        ctypes.memmove(*self.reads.pop(handle))
        self.num_read += 1
        return True

    def destroy(self) -> None:
        """Bytes of reads under way may arrive until now."""
        for read in self.reads.values():
            ctypes.memmove(*read)
        self.reads.clear()


class FakeStager:
    """The memory server's staging, without messages between."""

    def __init__(self, stagings: Stagings) -> None:
        self.stagings, self.is_lost, self.is_closed = stagings, False, False
        self.answers: list[int] = []

    def stage(self, number: int, slot: int, block_ids: list[int]) -> None:
        answers = self.stagings.stage(PEER, BlocksStaging(number, slot, pack_ids(block_ids)))
        self.answers += [answer.message.number for answer in answers if isinstance(answer.message, BlocksStaged)]

    def staged(self) -> Iterator[int]:
        if self.is_lost:
            raise MemoryLost("the gate ends")
        while self.answers:
            yield self.answers.pop()

    def close(self) -> None:
        self.is_closed = True


class Visit:
    """A pool with staging there, a pool here, and the reads between them."""

    def __init__(self) -> None:
        shape, backing = PoolShape(LAYOUT, (NUM_BLOCKS,)), HostBacking()
        self.source = np.random.default_rng(1).integers(0, 256, (NUM_BLOCKS, BLOCK_BYTES), np.uint8)
        self.there = make_pool(shape, backing.allocate(shape.num_bytes), 0.0, poisons=False)
        self.there.memory.write(0, self.source.tobytes())
        self.stagings = Stagings(backing)
        self.stagings.want(PEER, self.there, StagingWanted(*SLOTS))
        self.lent = np.zeros(0, np.uint8)
        eventually(self._is_lent)
        self.agent, self.stager = FakeAgent(), FakeStager(self.stagings)
        self.pool = KVPool(shape, torch.full((shape.num_bytes,), CANARY, dtype=torch.uint8))
        self.claim = LentClaim(
            b"", None, shape.num_bytes, 1, shape, b"lender", self.lent.ctypes.data, self.lent.nbytes, "tcp",
            cast(PeerPoolClient, None), SLOTS, lambda: cast(Stager, self.stager),
        )  # fmt: skip
        self.reads = self.opened(self.claim)

    def opened(self, claim: LentClaim) -> StagedReads:
        return StagedReads(cast(Agent, self.agent), claim, self.pool)

    def pull(self, sources: list[int], targets: list[int]) -> Callable[[], bool]:
        return self.reads.begin([(sources, targets)])

    def differing(self) -> set[int]:
        """Blocks here that are not as before."""
        return set((self.pool.blocks[0] != CANARY).any(dim=1).nonzero().flatten().tolist())

    def end(self) -> None:
        """As the owner of the agent does."""
        self.reads.close()
        self.agent.destroy()
        self.reads.free()

    def _is_lent(self) -> bool:
        for answer in self.stagings.update(PEER):
            assert answer.descriptor is not None
            self.lent = np.frombuffer(mmap.mmap(answer.descriptor, SLOTS.num_bytes, access=mmap.ACCESS_READ), np.uint8)
        return bool(self.lent.size)


@pytest.fixture
def visit() -> Iterator[Visit]:
    visit = Visit()
    yield visit
    visit.end()
    visit.stagings.close()
    visit.there.memory.close()


def test_pulls_arrive_and_no_other_block_is_touched(visit: Visit) -> None:
    assert visit.agent.num_registered == SLOTS.num_bytes
    first, second = visit.pull([5, 1, 30, 31, 32, 7, 9], [0, 3, 4, 5, 6, 20, 21]), visit.pull([2], [39])
    eventually(lambda: first() and second())
    here = visit.pool.blocks[0].numpy()
    assert np.array_equal(here[[0, 3, 4, 5, 6, 20, 21, 39]], visit.source[[5, 1, 30, 31, 32, 7, 9, 2]])
    assert visit.differing() == {0, 3, 4, 5, 6, 20, 21, 39}
    assert visit.agent.num_read == 5, "pulls do not share a slot"
    eventually(visit.pull([], []))


def test_reads_that_cannot_begin_say_so(visit: Visit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)

    def unreachable() -> Stager:
        raise MemoryLost("the gate is gone")

    def broken() -> Stager:
        raise ZeroDivisionError

    for open_stager, problem in ((unreachable, "the gate is gone"), (broken, "ended; see the log")):
        with pytest.raises(AgentError, match=problem):
            visit.opened(dataclasses.replace(visit.claim, open_stager=open_stager))


@pytest.mark.parametrize("what", ["read", "gate"])
def test_after_a_failure_pulls_say_so_and_not_a_byte_comes_into_the_pool(what: str, visit: Visit) -> None:
    ids = list(range(20))
    if what == "read":
        visit.agent.fails_after = 2
    else:
        visit.stager.is_lost = True
    is_over = visit.pull(ids, ids)

    def has_failed() -> bool:
        try:
            return is_over() and False
        except AgentError as error:
            return str(error) in ("the peer is gone", "the gate ends")

    eventually(has_failed)
    eventually(lambda: visit.stager.is_closed)
    before = visit.differing()
    assert before < set(ids)
    visit.end()
    assert visit.differing() == before


def test_an_end_amid_a_pull_waits_for_the_thread_and_late_bytes_miss_the_pool(visit: Visit) -> None:
    visit.agent.stalls_after = 3
    ids = list(range(30))
    is_over = visit.pull(ids, ids)
    eventually(lambda: len(visit.differing()) == 6)
    time.sleep(LATE_S)
    assert not is_over() and len(visit.agent.reads) == SLOTS.num_slots
    visit.end()
    assert visit.stager.is_closed and len(visit.differing()) == 6
