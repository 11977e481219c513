"""Staged pulls over fakes that end in any order: every byte arrives, and no slot is touched while it is at work."""

import random
from collections import deque
from collections.abc import Iterable

import numpy as np
import pytest

from common.kv.staging import Job, Piece, Pipeline, pieces
from common.memory.base.slots import MIN_SLOTS, NUM_SLOTS, SLOT_BYTES, slots_for
from common.memory.devices.backing import HostPiece, runs_of
from common.wire.values.kv_layout import KVLayout
from common.wire.values.pool_shape import PoolShape
from tests.support.layouts import one_group

NUM_SLOTS_HERE, NUM_BLOCKS = 3, 60
SMALL = one_group("model", num_layers=1, num_kv_heads=1, head_dim=2, block_size=1, dtype="float32")
LARGE = one_group("model", num_layers=3, num_kv_heads=1, head_dim=2, block_size=1, dtype="float32")
LAYOUT = KVLayout("model", (*SMALL.groups, *LARGE.groups))
SLOT_BYTES_HERE = 2 * LARGE.groups[0].block_bytes


class FakeSteps:
    """Steps that end when the test says so; bytes of a read and of a copy move at their end, as late as may be."""

    def __init__(self, theirs: PoolShape, ours: PoolShape, rng: random.Random) -> None:
        self.theirs, self.ours, self.rng = theirs, ours, rng
        self.source = np.frombuffer(rng.randbytes(theirs.num_bytes), np.uint8)
        self.target = np.zeros(ours.num_bytes, np.uint8)
        staging_bytes = NUM_SLOTS_HERE * SLOT_BYTES_HERE
        self.there, self.here = np.zeros(staging_bytes, np.uint8), np.zeros(staging_bytes, np.uint8)
        self.at_work: set[int] = set()
        self.num_at_once = 0
        self.asked: list[tuple[int, int, Piece]] = []
        self.reads: dict[int, tuple[int, Piece]] = {}
        self.copies: deque[tuple[int, Piece]] = deque()
        self.answers_none = False

    def stage(self, number: int, slot: int, piece: Piece) -> None:
        assert slot not in self.at_work and piece.num_bytes <= SLOT_BYTES_HERE
        self.at_work.add(slot)
        self.num_at_once = max(self.num_at_once, len(self.at_work))
        self.asked.append((number, slot, piece))

    def staged(self) -> Iterable[int]:
        self.rng.shuffle(self.asked)
        count = 0 if self.answers_none else self.rng.randint(0, len(self.asked))
        over, self.asked = self.asked[:count], self.asked[count:]
        for _, slot, piece in over:
            for run in runs_of(self.theirs, piece.source_ids, HostPiece(self.there), slot * SLOT_BYTES_HERE):
                self.there[run.place : run.place + run.num_bytes] = self.source[run.offset : run.offset + run.num_bytes]
        return [number for number, _, _ in over]

    def read(self, slot: int, piece: Piece) -> int:
        handle = self.rng.getrandbits(60)
        self.reads[handle] = slot, piece
        return handle

    def is_read(self, handle: int) -> bool:
        if self.rng.random() < 0.6:
            return False
        slot, piece = self.reads.pop(handle)
        place = slice(slot * SLOT_BYTES_HERE, slot * SLOT_BYTES_HERE + piece.num_bytes)
        self.here[place] = self.there[place]
        return True

    def copy(self, slot: int, piece: Piece) -> None:
        self.copies.append((slot, piece))

    def num_copied(self) -> int:
        count = self.rng.randint(0, len(self.copies))
        for _ in range(count):
            slot, piece = self.copies.popleft()
            for run in runs_of(self.ours, piece.target_ids, HostPiece(self.here), slot * SLOT_BYTES_HERE):
                self.target[run.offset : run.offset + run.num_bytes] = self.here[run.place : run.place + run.num_bytes]
            self.at_work.remove(slot)
        return count


Pairs = tuple[list[int], list[int]]


class Pulls:
    """Pools with two groups, of other sizes there than here, and pulls between random blocks."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.theirs, self.ours = PoolShape(LAYOUT, (NUM_BLOCKS, 30)), PoolShape(LAYOUT, (NUM_BLOCKS + 9, 40))
        self.steps = FakeSteps(self.theirs, self.ours, self.rng)
        self.pipeline = Pipeline(self.steps, NUM_SLOTS_HERE)
        # The groups' memory is one: small blocks from the lower half, large ones from the upper half.
        self.left = [
            [list(range(count // 2)) for count in (NUM_BLOCKS, NUM_BLOCKS)],
            [list(range(25, 30)) for _ in range(2)],
        ]
        for group in self.left:
            for ids in group:
                self.rng.shuffle(ids)

    def begin(self, *counts: int) -> tuple[Job, list[Pairs]]:
        groups = [
            ([sources.pop() for _ in range(count)], [targets.pop() for _ in range(count)])
            for (sources, targets), count in zip(self.left, counts, strict=True)
        ]
        job = Job(pieces(self.theirs, self.ours, groups, SLOT_BYTES_HERE))
        self.pipeline.waiting.append(job)
        return job, groups

    def has_arrived(self, groups: list[Pairs]) -> bool:
        for number, (sources, targets) in enumerate(groups):
            size = LAYOUT.groups[number].block_bytes
            for source, target in zip(sources, targets, strict=True):
                there = self.steps.source[source * size : (source + 1) * size]
                if not np.array_equal(self.steps.target[target * size : (target + 1) * size], there):
                    return False
        return True


@pytest.mark.parametrize("seed", range(20))
def test_pulls_arrive_whole_in_whatever_order_steps_end(seed: int) -> None:
    pulls = Pulls(seed)
    under_way = [pulls.begin(11, 2), pulls.begin(1, 0), pulls.begin(0, 3)]
    seen = 0
    while not all(job.is_over for job, _ in under_way):
        assert pulls.pipeline.turn() or all(job.is_over for job, _ in under_way)
        for job, groups in under_way:
            assert not job.is_over or pulls.has_arrived(groups)
        seen += 1
        assert seen < 10_000
        if seen == 5:
            under_way.append(pulls.begin(4, 0))
    assert not pulls.pipeline.turn() and not pulls.steps.at_work
    assert pulls.steps.num_at_once == NUM_SLOTS_HERE, "slots are filled side by side"
    moved = sum(
        LAYOUT.groups[number].block_bytes * len(targets)
        for _, groups in under_way
        for number, (_, targets) in enumerate(groups)
    )
    assert np.count_nonzero(pulls.steps.target) <= moved


def test_a_memory_server_that_does_not_answer_fills_no_slot_and_no_more_are_asked_for() -> None:
    pulls = Pulls(1)
    job, _ = pulls.begin(20, 0)
    pulls.steps.answers_none = True
    for _ in range(100):
        assert pulls.pipeline.turn()
    assert len(pulls.steps.asked) == NUM_SLOTS_HERE and not job.is_over
    assert not pulls.steps.target.any()


def test_slots_hold_the_largest_block_and_are_two_at_least() -> None:
    assert slots_for(SMALL) == (NUM_SLOTS, SLOT_BYTES)
    huge = one_group("model", num_layers=64, num_kv_heads=64, head_dim=256, block_size=16, dtype="float32")
    assert slots_for(huge) == (MIN_SLOTS, huge.groups[0].block_bytes)
