import fcntl
import os
from pathlib import Path

import pytest

from common.errors import ConfigError
from common.kv.shm import SHM_DIR, ShmMemory, remove_abandoned


def test_segments_of_the_dead_are_removed_and_those_of_the_living_kept() -> None:
    abandoned = SHM_DIR / f"baton-abandoned-{os.getpid()}"
    abandoned.write_bytes(b"x")
    alive = ShmMemory(4096, f"alive-{os.getpid()}")
    remove_abandoned()
    assert not abandoned.exists()
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
