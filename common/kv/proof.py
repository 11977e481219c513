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
_REPEATS = 3


def prove_path(peer: PeerPool, export: KVPoolExport, ours: KVPool, allocator: Allocator) -> Proof:
    """Pull the proof block into ours and compare, then time a larger pull.

    Raises TransferFailed when the bytes differ or do not arrive in time. Needs no free block; borrows some if there
    are any and gives them back, also when it is closed: what they held is overwritten. One proof at a time, as all
    use the same block of ours.
    """
    block_bytes = ours.layout.block_bytes
    yield from _arrival(peer.pull([export.proof_block], ours, [PROOF_BLOCK]))
    yield from _comparison(ours.read_block(PROOF_BLOCK), export.pool_id)
    measured = _MEASURED_BYTES[ours.blocks.device.type] // block_bytes
    borrowed = allocator.allocate(min(measured, allocator.num_free // 2, export.num_blocks - 1))
    targets = [PROOF_BLOCK, *borrowed]
    durations_s = []
    try:
        for _ in range(_REPEATS):
            pull = peer.pull(list(range(len(targets))), ours, targets)
            yield from _arrival(pull)
            durations_s.append(pull.duration_s())
    finally:
        allocator.free(borrowed)
    return len(targets) * block_bytes / min(durations_s) / 1e9


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
