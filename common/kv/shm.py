"""Pools in host memory, for workers on a CPU: anonymous files, read by pulls.

The files are not mapped, because a mapped file that shrinks would end the process with SIGBUS.
"""

import os
import time

import torch

from common.base.errors import TransferFailed
from common.kv.pool import KVPool
from common.kv.transport import check_size, pairs_by_group
from common.memory.client.client import PoolClaim


class ShmPeerPool:
    """A peer's pool as a file."""

    proof_bytes = 16 << 20

    def __init__(self, claim: PoolClaim, worker_id: str) -> None:
        if claim.descriptor is None:
            raise TransferFailed(f"the pool of worker {worker_id} came without a file; is it on a GPU?")
        check_size(claim, worker_id, os.fstat(claim.descriptor).st_size)
        self.descriptor, self.shape, self.worker_id = claim.descriptor, claim.shape, worker_id

    def is_open(self, target: KVPool) -> bool:
        return True

    def pull(self, source_ids: list[int], target: KVPool, target_ids: list[int]) -> "FinishedPull":
        """Copy before returning, because a CPU has no asynchronous copies."""
        begin_s = time.perf_counter()
        for number, (sources, targets) in enumerate(pairs_by_group(self.shape, source_ids, target.shape, target_ids)):
            blocks = target.blocks[number].numpy()  # [num_blocks, block_bytes]
            block_bytes = blocks.shape[1]
            for source, block in zip(sources, targets, strict=True):
                if os.preadv(self.descriptor, [blocks[block]], source * block_bytes) != block_bytes:
                    block_id = self.shape.begins[number] + source
                    raise TransferFailed(f"block {block_id} of the pool of worker {self.worker_id} is not all there")
        return FinishedPull(time.perf_counter() - begin_s)

    def close(self) -> None:
        """Do nothing, because the caller owns the file."""


class FinishedPull:
    """A pull that was complete when it was started."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def done(self) -> bool:
        return True

    def duration_s(self) -> float:
        return self.seconds


def open_peer(claim: PoolClaim, worker_id: str, device: torch.device) -> ShmPeerPool:
    """Open a peer's pool (see `Transport`)."""
    return ShmPeerPool(claim, worker_id)
