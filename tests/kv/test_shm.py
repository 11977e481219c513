import fcntl
import os
import stat
from pathlib import Path

import pytest
import torch

from common.errors import ConfigError, TransferFailed
from common.kv.pool import KVPool
from common.kv.shm import SHM_DIR, ShmMemory, ShmPeerPool, remove_abandoned
from common.wire.pool_shape import PoolShape
from tests.kv.peer_process import BLOCK_BYTES, LAYOUT
from tests.messages import pool_export


def test_segments_of_the_dead_are_removed_and_those_of_the_living_kept() -> None:
    abandoned = SHM_DIR / f"baton-abandoned-{os.getpid()}"
    unnamed, new = (SHM_DIR / f".baton-{name}-{os.getpid()}" for name in ("unnamed", "new"))
    for path in (abandoned, unnamed, new):
        path.write_bytes(b"x")
    os.utime(unnamed, (0, 0))
    alive = ShmMemory(4096, f"alive-{os.getpid()}")
    remove_abandoned()
    assert not abandoned.exists()
    assert not unnamed.exists()
    assert new.exists(), "its owner may be about to lock it"
    new.unlink()
    assert alive.path.exists()
    alive.close()
    assert not alive.path.exists()


def test_too_large_a_segment_says_what_to_do_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"lower kv\.cpu_pool_bytes or enlarge /dev/shm"):
        ShmMemory(1 << 60, "huge")
    assert not list(SHM_DIR.glob("*baton-huge*"))


def test_a_segment_is_locked_by_its_owner() -> None:
    memory = ShmMemory(4096, f"locked-{os.getpid()}")
    with memory.path.open("rb") as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    memory.close()


def test_a_segment_is_for_its_own_user_alone() -> None:
    before = os.umask(0)
    try:
        memory = ShmMemory(4096, f"private-{os.getpid()}")
    finally:
        os.umask(before)
    assert stat.S_IMODE(memory.path.stat().st_mode) == 0o600
    memory.close()


def test_a_segment_that_becomes_shorter_after_it_was_opened_fails_the_pull_and_not_the_process() -> None:
    theirs = ShmMemory(4 * BLOCK_BYTES, f"shorter-{os.getpid()}")
    theirs.tensor.fill_(7)
    ours = KVPool(PoolShape(LAYOUT, (4,)), ShmMemory(4 * BLOCK_BYTES, f"ours-{os.getpid()}"))
    peer = ShmPeerPool(pool_export(handle=theirs.handle(), num_blocks=(4,), layout=LAYOUT))
    assert peer.pull([3], ours, [0]).done()
    assert torch.equal(ours.blocks[0][0], torch.full((BLOCK_BYTES,), 7, dtype=torch.uint8))
    os.truncate(theirs.path, BLOCK_BYTES + 1)
    with pytest.raises(TransferFailed, match="has become shorter: block 1 is not all there"):
        peer.pull([0, 1], ours, [1, 2])
    peer.close()
    ours.close()
    theirs.close()
