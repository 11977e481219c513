"""Proof that blocks really travel: when two workers meet, a known block is pulled and compared."""

import time
from collections.abc import Generator, Iterator
from itertools import chain

from common.base.errors import TransferFailed
from common.kv.blocks import Allocator
from common.kv.pool import KVPool
from common.kv.transport import PeerPool, Pull
from common.memory.base.pattern import pattern_pieces
from common.wire.values.kv_layout import Counts
from common.wire.values.pool_shape import PoolShape

Proof = Generator[None, None, float]
"""A proof under way: to be resumed again and again, as it never waits; its value is GB/s."""

PROOF_TIMEOUT_S = 2.0
"""A pull takes milliseconds."""
_MEASURED_BYTES = {"cuda": 256 * 1024 * 1024, "cpu": 16 * 1024 * 1024}
_AT_MOST = 16
"""Of a pool, a proof takes one part in so many: it shows in heartbeats as blocks in use."""
_REPEATS = 3


def prove_path(peer: PeerPool, pool_id: int, ours: KVPool, allocator: Allocator) -> Proof:
    """Pull the proof block of each group of that pool into one of ours and compare, then time a larger pull.

    Raises TransferFailed when the bytes differ or do not arrive in time, or there is no block to pull into. What it
    borrows it gives back, also when it is closed.
    """
    theirs, shape = peer.shape, ours.shape
    measured = _measured(ours, theirs, allocator)
    yield from _room(allocator, tuple(max(1, count) for count in measured))
    one_each = (max(1, count) for count in map(min, measured, allocator.num_free))
    targets = allocator.allocate(tuple(one_each))
    durations_s = []
    try:
        firsts = [ids[0] for ids in targets]
        yield from _arrival(peer.pull(theirs.proof_ids, ours, firsts))
        for proof_id, first in zip(theirs.proof_ids, firsts, strict=True):
            yield from _comparison(ours.read_block(first), pool_id, proof_id)
        target_ids = list(chain.from_iterable(targets))
        sources = (range(begin, begin + len(ids)) for begin, ids in zip(theirs.proof_ids, targets, strict=True))
        source_ids = list(chain.from_iterable(sources))
        for _ in range(_REPEATS):
            pull = peer.pull(source_ids, ours, target_ids)
            yield from _arrival(pull)
            durations_s.append(pull.duration_s())
    finally:
        allocator.free(chain.from_iterable(targets))
    return sum(shape.place(block_id).num_bytes for block_id in target_ids) / min(durations_s) / 1e9


def _measured(ours: KVPool, theirs: PoolShape, allocator: Allocator) -> Counts:
    """Blocks of each group to time a pull of, beside the proof blocks."""
    num_bytes = _MEASURED_BYTES[ours.blocks[0].device.type] // len(ours.blocks)
    wanted = (num_bytes // group.block_bytes for group in ours.layout.groups)
    return tuple(map(min, wanted, theirs.capacity, (count // _AT_MOST for count in allocator.capacity)))


def _room(allocator: Allocator, num_wanted: Counts) -> Iterator[None]:
    """Until there are so many blocks to copy into, or at least one of each group after a while."""
    deadline_s = time.monotonic() + PROOF_TIMEOUT_S
    while not allocator.fetch(num_wanted):
        is_late = time.monotonic() > deadline_s
        if is_late and all(allocator.num_free):
            return
        if is_late:
            raise TransferFailed(f"the pool here is full: no block for the proof within {PROOF_TIMEOUT_S:.0f} s")
        yield


def _arrival(pull: Pull) -> Iterator[None]:
    deadline_s = time.monotonic() + PROOF_TIMEOUT_S
    while not pull.done():
        if time.monotonic() > deadline_s:
            raise TransferFailed(f"the proof block did not arrive within {PROOF_TIMEOUT_S:.0f} s")
        yield


def _comparison(arrived: bytes, pool_id: int, block_id: int) -> Iterator[None]:
    begin = 0
    for piece in pattern_pieces(pool_id, block_id, len(arrived)):
        if arrived[begin : begin + len(piece)] != piece:
            raise TransferFailed("the proof block arrived with other bytes than the peer wrote")
        begin += len(piece)
        yield
