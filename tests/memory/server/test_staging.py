"""Staging at a memory server: blocks come into their slots, and a peer may claim no more than its own."""

import mmap
import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from common.base.errors import MemoryShort
from common.memory.blocks.answers import ProtocolError
from common.memory.blocks.pool import Pool
from common.memory.devices.backing import Copy, CopyFailed, Memory, Run, SharedPiece
from common.memory.devices.host_backing import Done, HostBacking
from common.memory.server.pools import make_pool
from common.memory.server.staging import Stagings
from common.wire.messages.staging import BlocksStaged, BlocksStaging, StagingRegion, StagingWanted
from common.wire.values.packing import pack_ids
from common.wire.values.pool_shape import PoolShape
from tests.memory.server.test_server import eventually
from tests.support.messages import LAYOUT

[GROUP] = LAYOUT.groups
SIZE, NUM_BLOCKS, PEER = GROUP.block_bytes, 9, 7
WANTED = StagingWanted(2, 3 * SIZE)


class SlowCopies:
    """Copies that end when the test says so."""

    batch_bytes = 1

    def __init__(self) -> None:
        self.begun: list[Callable[[], Copy]] = []
        self.is_broken = False

    def begin(self, memory: Memory, runs: Sequence[Run], *, is_out: bool) -> "SlowCopy":
        copy = SlowCopy(self)
        self.begun.append(lambda: copy.end(memory, runs))
        return copy

    def finish(self) -> None:
        for end in self.begun:
            end()


class SlowCopy:
    """A copy of `SlowCopies`."""

    def __init__(self, copies: SlowCopies) -> None:
        self.copies, self.copy = copies, None

    copy: Copy | None

    def end(self, memory: Memory, runs: Sequence[Run]) -> Copy:
        self.copy = HostBacking().copies().begin(memory, runs, is_out=True)
        return self.copy

    def took_s(self) -> float | None:
        if self.copies.is_broken:
            raise CopyFailed("gone")
        return Done(0.0).took_s() if self.copy is not None else None


class SlowBacking(HostBacking):
    """Counts pieces of staging that are there."""

    def __init__(self) -> None:
        self.slow, self.num_made, self.num_closed = SlowCopies(), 0, 0
        self.may_make = threading.Event()
        self.may_make.set()
        self.is_short = False

    def copies(self) -> SlowCopies:  # type: ignore[override]
        return self.slow

    def shared_piece(self, num_bytes: int) -> SharedPiece:
        self.may_make.wait()
        if self.is_short:
            raise MemoryShort("nothing is left")
        shared = super().shared_piece(num_bytes)
        self.num_made += 1

        def close() -> None:
            self.num_closed += 1

        piece = shared.piece.__class__(shared.piece.content, close)
        return SharedPiece(piece, shared.descriptor)


class Staged:
    """Staging at a pool with different bytes in each block."""

    def __init__(self) -> None:
        self.backing = SlowBacking()
        self.stagings = Stagings(self.backing)
        shape = PoolShape(LAYOUT, (NUM_BLOCKS,))
        self.pool: Pool = make_pool(shape, self.backing.allocate(shape.num_bytes), 0.0, poisons=False)
        for block_id in range(NUM_BLOCKS):
            self.pool.memory.write(block_id * SIZE, bytes([block_id + 1]) * SIZE)
        self.content = np.zeros(0, np.uint8)

    def open(self) -> None:
        self.stagings.want(PEER, self.pool, WANTED)

        def is_told() -> bool:
            for answer in self.stagings.update(PEER):
                assert answer.message == StagingRegion(2 * 3 * SIZE) and answer.descriptor is not None
                mapped = mmap.mmap(answer.descriptor, 2 * 3 * SIZE, access=mmap.ACCESS_READ)
                self.content = np.frombuffer(mapped, np.uint8)
            return bool(self.content.size)

        eventually(is_told)

    def stage(self, number: int, slot: int, *block_ids: int) -> list[int]:
        return self.numbers(self.stagings.stage(PEER, BlocksStaging(number, slot, pack_ids(block_ids))))

    def update(self) -> list[int]:
        return self.numbers(self.stagings.update(PEER))

    def numbers(self, answers: Sequence[object]) -> list[int]:
        messages = [answer.message for answer in answers]  # type: ignore[attr-defined]
        assert all(isinstance(message, BlocksStaged) for message in messages)
        return [message.number for message in messages]

    def blocks(self, slot: int) -> list[int]:
        """Ids of the blocks in a slot, -1 for a torn one."""
        rows = self.content.reshape(2, 3, SIZE)[slot]
        return [int(row[0]) - 1 if (row == row[0]).all() else -1 for row in rows]


@pytest.fixture
def staged() -> Iterator[Staged]:
    staged = Staged()
    yield staged
    staged.backing.slow.is_broken = False
    staged.stagings.close()
    staged.pool.memory.close()


def test_blocks_are_in_their_slot_once_it_is_said(staged: Staged) -> None:
    staged.open()
    assert staged.stage(5, 1, 8, 2, 3) == [] and staged.stage(6, 0, 4) == []
    assert staged.stagings.is_busy
    staged.backing.slow.begun[1]()
    assert staged.update() == [6] and staged.blocks(0)[0] == 4
    assert staged.update() == []
    staged.backing.slow.begun[0]()
    assert staged.update() == [5] and staged.blocks(1) == [8, 2, 3]
    assert not staged.stagings.is_busy


def test_a_slot_is_not_filled_while_it_is_being_filled_and_no_other_memory_is_reached(staged: Staged) -> None:
    with pytest.raises(ProtocolError, match="no staging"):
        staged.stage(1, 0, 1)
    staged.open()
    staged.stage(1, 0, 1)
    for slot, block_ids, problem in (
        (0, (2,), "slot 0 of 2 is not its own"),
        (2, (2,), "slot 2 of 2"),
        (1, (), "blocks beyond"),
        (1, (NUM_BLOCKS,), "blocks beyond the pool's 9"),
        (1, (1, 2, 3, 4), "4 blocks for a slot of"),
    ):
        with pytest.raises(ProtocolError, match=problem):
            staged.stage(2, slot, *block_ids)
    assert len(staged.backing.slow.begun) == 1
    with pytest.raises(ProtocolError, match="staging already"):
        staged.stagings.want(PEER, staged.pool, WANTED)
    with pytest.raises(ProtocolError, match="less than a block"):
        staged.stagings.want(PEER + 1, staged.pool, StagingWanted(2, SIZE - 1))


def test_staging_of_a_gone_peer_is_kept_until_its_copies_are_over(staged: Staged) -> None:
    staged.open()
    staged.stage(1, 0, 1)
    staged.stagings.leave(PEER)
    staged.stagings.free()
    assert staged.stagings.is_busy and staged.backing.num_closed == 0
    staged.backing.slow.begun[0]()
    staged.stagings.free()
    assert not staged.stagings.is_busy and staged.backing.num_closed == 1


def test_staging_of_a_peer_that_leaves_while_it_is_made_is_freed(staged: Staged) -> None:
    staged.backing.may_make.clear()
    staged.stagings.want(PEER, staged.pool, WANTED)
    staged.stagings.leave(PEER)
    staged.stagings.free()
    assert staged.stagings.is_busy
    staged.backing.may_make.set()

    def is_freed() -> bool:
        staged.stagings.free()
        return not staged.stagings.is_busy

    eventually(is_freed)
    assert staged.backing.num_made == staged.backing.num_closed == 1


def test_without_room_a_peer_is_refused_and_after_a_fault_it_is_dropped(staged: Staged) -> None:
    staged.backing.is_short = True
    staged.stagings.want(PEER + 1, staged.pool, WANTED)

    def is_refused() -> bool:
        try:
            return bool(staged.stagings.update(PEER + 1))
        except MemoryShort as short:
            return "nothing is left" in str(short)

    eventually(is_refused)
    staged.stagings.leave(PEER + 1)
    staged.backing.is_short = False
    staged.open()
    staged.stage(1, 0, 1)
    staged.backing.slow.is_broken = True
    with pytest.raises(Exception, match="cannot be copied: gone"):
        staged.update()
    staged.stagings.leave(PEER)
    staged.stagings.free()
    assert not staged.stagings.is_busy and staged.backing.num_closed == 1
