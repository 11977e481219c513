"""Proof that blocks really travel: when two workers meet, a known block is pulled and compared."""

import random
import time

from common.errors import TransferFailed
from common.kv.blocks import PROOF_BLOCK, BlockAllocator
from common.kv.pool import KVPool
from common.kv.transport import PeerPool, Pull
from common.wire.handoff_messages import KVPoolExport

PROOF_TIMEOUT_S = 2.0
"""A block takes milliseconds; whoever proves a path stands still meanwhile."""
_MEASURED_BYTES = {"cuda": 256 * 1024 * 1024, "cpu": 16 * 1024 * 1024}
_REPEATS = 3


def pattern(epoch: int, num_bytes: int) -> bytearray:
    """The bytes that a worker of this epoch keeps in its proof block."""
    return bytearray(random.Random(epoch).randbytes(num_bytes))


def prove_path(peer: PeerPool, export: KVPoolExport, ours: KVPool, allocator: BlockAllocator) -> float:
    """Pull the proof block into ours and compare, then time a larger pull; returns GB/s.

    Raises TransferFailed when the bytes differ or do not arrive in time. Needs no free block; uses some if there
    are any and gives them back: what they held is overwritten.
    """
    block_bytes = ours.layout.block_bytes
    _wait(peer.pull([export.proof_block], ours, [PROOF_BLOCK]))
    if ours.read_block(PROOF_BLOCK) != pattern(export.epoch, block_bytes):
        raise TransferFailed("the proof block arrived with other bytes than the peer wrote")
    measured = _MEASURED_BYTES[ours.blocks.device.type] // block_bytes
    borrowed = allocator.allocate(min(measured, allocator.num_free // 2, export.num_blocks - 1))
    targets = [PROOF_BLOCK, *borrowed]
    try:
        best_s = min(_timed(peer, list(range(len(targets))), ours, targets) for _ in range(_REPEATS))
    finally:
        allocator.free(borrowed)
    return len(targets) * block_bytes / best_s / 1e9


def _timed(peer: PeerPool, sources: list[int], ours: KVPool, targets: list[int]) -> float:
    begin_s = time.perf_counter()
    _wait(peer.pull(sources, ours, targets))
    return time.perf_counter() - begin_s


def _wait(pull: Pull) -> None:
    deadline_s = time.monotonic() + PROOF_TIMEOUT_S
    while not pull.done():
        if time.monotonic() > deadline_s:
            raise TransferFailed(f"the proof block did not arrive within {PROOF_TIMEOUT_S:.0f} s")
