"""Private directory with the sockets of the processes of a `baton serve`.

The directory is locked while its supervisor lives. So the next supervisor recognizes and removes directories of killed
supervisors.
"""

import asyncio
import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

MAX_SOCKET_PATH_BYTES = 100  # a unix socket's path ends at 107 bytes
PREFIX = "baton-serve-"
NEW_S = 60.0
"""Age in seconds below which a directory may be about to be locked."""
LOOK_S = 1.0


@contextlib.contextmanager
def make_runtime_dir() -> Iterator[Path]:
    """Make a directory (mode 700) for sockets, removed when the context ends."""
    parent = Path(tempfile.gettempdir())
    if len(str(parent)) + len(f"/{PREFIX}12345678/decode-100.sock") > MAX_SOCKET_PATH_BYTES:
        parent = Path("/tmp")
    remove_abandoned(parent)
    with tempfile.TemporaryDirectory(prefix=PREFIX, dir=parent) as name, _locked(Path(name)):
        yield Path(name)


async def until_lost(path: Path) -> None:
    """Wait until the directory has been removed."""
    inode = path.stat().st_ino
    while True:
        await asyncio.sleep(LOOK_S)
        try:
            if path.stat().st_ino != inode:
                return
        except FileNotFoundError:
            return


def remove_abandoned(parent: Path) -> None:
    """Remove directories of this user whose supervisor is gone, as told by a free lock."""
    for path in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            status = path.lstat()
            if status.st_uid == os.getuid() and time.time() - status.st_mtime > NEW_S:
                with _locked(path):
                    shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of a directory; raises BlockingIOError if another process holds the lock."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)
