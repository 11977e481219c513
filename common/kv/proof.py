"""Proof that blocks really travel: when two workers meet, a known block is pulled and compared."""

import random
import time

from common.errors import TransferFailed
from common.kv.blocks import BlockAllocator
from common.kv.pool import KVPool
from common.kv.transport import PeerPool, Pull
from common.wire.messages import KVPoolExport

PROOF_TIMEOUT_S = 10.0
_MEASURED_BYTES = {"cuda": 256 * 1024 * 1024, "cpu": 16 * 1024 * 1024}
_REPEATS = 3


def pattern(epoch: int, num_bytes: int) -> bytearray:
    """The bytes that a worker of this epoch keeps in its proof block."""
    return bytearray(random.Random(epoch).randbytes(num_bytes))


def prove_path(peer: PeerPool, export: KVPoolExport, ours: KVPool, allocator: BlockAllocator) -> float:
    """Pull the proof block and compare, then time a larger pull; returns GB/s.

    Raises TransferFailed when the bytes differ or do not arrive in time. Uses free blocks of ours
    and gives them back; what they held is overwritten.
    """
    block_bytes = ours.layout.block_bytes
    measured = _MEASURED_BYTES[ours.blocks.device.type] // block_bytes
    count = max(1, min(measured, allocator.num_free // 2, export.num_blocks))
    targets = allocator.allocate(count)
    try:
        _wait(peer.pull([export.proof_block], ours, targets[:1]))
        if ours.read_block(targets[0]) != pattern(export.epoch, block_bytes):
            raise TransferFailed("the proof block arrived with other bytes than the peer wrote")
        best_s = min(_timed(peer, list(range(count)), ours, targets) for _ in range(_REPEATS))
    finally:
        allocator.free(targets)
    return count * block_bytes / best_s / 1e9


def _timed(peer: PeerPool, sources: list[int], ours: KVPool, targets: list[int]) -> float:
    begin_s = time.perf_counter()
    _wait(peer.pull(sources, ours, targets))
    return time.perf_counter() - begin_s


def _wait(pull: Pull) -> None:
    deadline_s = time.monotonic() + PROOF_TIMEOUT_S
    while not pull.done():
        if time.monotonic() > deadline_s:
            raise TransferFailed(f"the proof block did not arrive within {PROOF_TIMEOUT_S:.0f} s")
