"""Proof that blocks really travel: when two workers meet, a known block is pulled and compared."""

import time
from collections.abc import Generator, Iterator

from common.errors import TransferFailed
from common.kv.blocks import Allocator
from common.kv.pool import KVPool
from common.kv.transport import PeerPool, Pull
from common.memory.pattern import pattern_pieces
from common.wire.handoff_messages import KVPoolExport
from common.wire.kv_layout import PROOF_BLOCK

Proof = Generator[None, None, float]
"""A proof under way: to be resumed again and again, as it never waits; its value is GB/s."""

PROOF_TIMEOUT_S = 2.0
"""A pull takes milliseconds."""
_MEASURED_BYTES = {"cuda": 256 * 1024 * 1024, "cpu": 16 * 1024 * 1024}
_AT_MOST = 16
"""Of a pool, a proof takes one part in so many: it shows in heartbeats as blocks in use."""
_REPEATS = 3


def prove_path(peer: PeerPool, export: KVPoolExport, ours: KVPool, allocator: Allocator) -> Proof:
    """Pull the proof block into ours and compare, then time a larger pull.

    Raises TransferFailed when the bytes differ or do not arrive in time. Needs no free block of a pool of our own, and
    one of a shared one; borrows more if there are any and gives them back, also when it is closed: what they held is
    overwritten. One proof at a time, as all use the same block of ours.
    """
    block_bytes = ours.layout.block_bytes
    measured = min(_MEASURED_BYTES[ours.blocks.device.type] // block_bytes, export.num_blocks - 1)
    if allocator.has_proof_block:
        borrowed = allocator.allocate(min(measured, allocator.num_free // 2, allocator.capacity // _AT_MOST))
        targets = [PROOF_BLOCK, *borrowed]
    else:
        yield from _room(allocator, min(measured, allocator.capacity // _AT_MOST))
        targets = borrowed = allocator.allocate(min(measured, allocator.num_free))
    durations_s = []
    try:
        yield from _arrival(peer.pull([export.proof_block], ours, targets[:1]))
        yield from _comparison(ours.read_block(targets[0]), export.pool_id)
        for _ in range(_REPEATS):
            pull = peer.pull(list(range(len(targets))), ours, targets)
            yield from _arrival(pull)
            durations_s.append(pull.duration_s())
    finally:
        allocator.free(borrowed)
    return len(targets) * block_bytes / min(durations_s) / 1e9


def _room(allocator: Allocator, num_wanted: int) -> Iterator[None]:
    """Until there are so many blocks of a shared pool to copy into, or at least one after a while."""
    deadline_s = time.monotonic() + PROOF_TIMEOUT_S
    while not allocator.has(max(1, num_wanted)):
        if time.monotonic() > deadline_s and allocator.num_free:
            return
        if time.monotonic() > deadline_s:
            raise TransferFailed(f"the pool here is full: no block for the proof within {PROOF_TIMEOUT_S:.0f} s")
        yield


def _arrival(pull: Pull) -> Iterator[None]:
    deadline_s = time.monotonic() + PROOF_TIMEOUT_S
    while not pull.done():
        if time.monotonic() > deadline_s:
            raise TransferFailed(f"the proof block did not arrive within {PROOF_TIMEOUT_S:.0f} s")
        yield


def _comparison(arrived: bytes, pool_id: int) -> Iterator[None]:
    begin = 0
    for piece in pattern_pieces(pool_id, len(arrived)):
        if arrived[begin : begin + len(piece)] != piece:
            raise TransferFailed("the proof block arrived with other bytes than the peer wrote")
        begin += len(piece)
        yield
