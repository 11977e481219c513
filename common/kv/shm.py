"""Pools in POSIX shared memory, for workers on a CPU. A pull reads the peer's segment as a file.

Were it mapped, a segment that becomes shorter would end this process with SIGBUS.
The owner holds a lock on its segment while it lives, so that whoever starts next can tell the
segments that a killed worker left behind and remove them.
"""

import contextlib
import fcntl
import mmap
import os
import re
import time
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from common.errors import ConfigError, TransferFailed
from common.kv.blocks import check_sources
from common.kv.pool import KVPool
from common.kv.transport import check_size, pairs_by_group, shape_of
from common.wire.handoff_messages import KVPoolExport

SHM_DIR = Path("/dev/shm")
PREFIX = "baton-"
NEW_S = 60.0
_NAME = re.compile(rf"{PREFIX}[A-Za-z0-9._-]{{1,200}}")


class ShmMemory:
    """A segment that this process owns."""

    def __init__(self, num_bytes: int, label: str) -> None:
        remove_abandoned()
        self.path = SHM_DIR / (PREFIX + re.sub(r"[^A-Za-z0-9._-]", "_", label)[:180])
        try:
            self.file = _reserved(self.path, num_bytes)
        except OSError as error:
            raise ConfigError(
                f"{self.path}: cannot reserve {num_bytes} bytes ({error.strerror}); "
                "lower kv.cpu_pool_bytes or enlarge /dev/shm (docker: shm_size)"
            ) from None
        self.tensor = _mapped(self.file.fileno(), num_bytes)

    def handle(self) -> bytes:
        return self.path.name.encode()

    def close(self) -> None:
        self.path.unlink(missing_ok=True)
        self.file.close()


class ShmPeerPool:
    """A peer's segment."""

    def __init__(self, export: KVPoolExport) -> None:
        if not export.handle:
            raise TransferFailed(
                f"the pool of worker {export.worker_id} is a memory server's that this worker does not use; "
                "give both the same worker.memory_socket"
            )
        name = export.handle.decode("ascii", "replace")
        if not _NAME.fullmatch(name):
            raise TransferFailed(f"worker {export.worker_id} names no shared memory segment: {name!r:.80}")
        try:
            self.file = (SHM_DIR / name).open("rb", buffering=0)
        except OSError as error:
            raise TransferFailed(
                f"cannot open segment {name} of worker {export.worker_id} ({error.strerror}); "
                "do the workers share /dev/shm (docker: the same ipc namespace)?"
            ) from None
        self.name, self.shape = name, shape_of(export)
        try:
            check_size(export, os.fstat(self.file.fileno()).st_size)
        except TransferFailed:
            self.file.close()
            raise

    def pull(self, source_ids: list[int], target: KVPool, target_ids: list[int]) -> "FinishedPull":
        """Copies before it returns: on a CPU there is nobody else to do it."""
        check_sources(source_ids, self.shape.num_ids)
        begin_s = time.perf_counter()
        for number, (sources, targets) in enumerate(pairs_by_group(self.shape, source_ids, target.shape, target_ids)):
            blocks = target.blocks[number].numpy()  # [num_blocks, block_bytes]
            offset, block_bytes = self.shape.offsets[number], blocks.shape[1]
            for source, block in zip(sources, targets, strict=True):
                if os.preadv(self.file.fileno(), [blocks[block]], offset + source * block_bytes) != block_bytes:
                    block_id = self.shape.proof_ids[number] + source
                    raise TransferFailed(f"segment {self.name} has become shorter: block {block_id} is not all there")
        return FinishedPull(time.perf_counter() - begin_s)

    def close(self) -> None:
        self.file.close()


class FinishedPull:
    """A pull that was complete when it was started."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def done(self) -> bool:
        return True

    def duration_s(self) -> float:
        return self.seconds


class ShmTransport:
    """The `shm` entry of `TRANSPORTS`."""

    name = "shm"

    def allocate(self, num_bytes: int, device: torch.device, label: str) -> ShmMemory:
        return ShmMemory(num_bytes, label)

    def open_peer(self, export: KVPoolExport, device: torch.device) -> ShmPeerPool:
        return ShmPeerPool(export)


def remove_abandoned() -> None:
    """Remove the segments whose owner is gone: the ones whose lock is free.

    Of those without their name yet, none so new that it may be about to be locked.
    """
    unnamed = [path for path in SHM_DIR.glob(f".{PREFIX}*") if not _is_new(path)]
    for path in [*SHM_DIR.glob(f"{PREFIX}*"), *unnamed]:
        with contextlib.suppress(OSError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)


def _is_new(path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return time.time() - path.stat().st_mtime < NEW_S
    return False


def _reserved(path: Path, num_bytes: int) -> BinaryIO:
    """A new locked file of that size; it gets its name, and so is seen by others, when it is locked."""
    unlocked = path.with_name(f".{path.name}")
    file = os.fdopen(os.open(unlocked, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), "r+b")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.posix_fallocate(file.fileno(), 0, num_bytes)
        unlocked.rename(path)
    except OSError:
        file.close()
        unlocked.unlink(missing_ok=True)
        raise
    return file


def _mapped(descriptor: int, num_bytes: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)


TRANSPORT = ShmTransport()
