import os

import pytest
import torch

from common.base.errors import TransferFailed
from common.kv.pool import KVPool
from common.kv.shm import ShmPeerPool
from common.memory.client.client import PoolClaim
from common.wire.values.pool_shape import PoolShape
from tests.kv.peer_process import BLOCK_BYTES, LAYOUT


def test_memory_that_becomes_shorter_after_it_was_opened_fails_the_pull_and_not_the_process() -> None:
    size = BLOCK_BYTES
    shape = PoolShape(LAYOUT, (4,))
    theirs = os.memfd_create("theirs")
    os.write(theirs, b"\x07" * (4 * size))
    ours = KVPool(shape, torch.empty(4 * size, dtype=torch.uint8))
    peer = ShmPeerPool(PoolClaim(b"", theirs, 4 * size, 1, shape), "p")
    assert peer.pull([3], ours, [0]).done()
    assert torch.equal(ours.blocks[0][0], torch.full((size,), 7, dtype=torch.uint8))
    os.truncate(theirs, size + 1)
    with pytest.raises(TransferFailed, match="block 1 of the pool of worker p is not all there"):
        peer.pull([0, 1], ours, [1, 2])
    peer.close()
    os.close(theirs)
