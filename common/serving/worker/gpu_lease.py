"""Choice of a GPU for a worker without a configured device: fewest workers of the role, then fewest in all.

A worker on a GPU locks a file beside the memory servers' sockets until the process ends. So workers starting at once
see each other, even in separate containers, and a restarted worker finds its place free.
"""

import contextlib
import fcntl
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

import torch

from common.device.engine.engine import describe_device
from common.settings.config import Config
from common.wire.messages.worker import Role
from common.wire.transport.endpoints import shared_directory

logger = logging.getLogger(__name__)

CHOICE = "gpus.lock"
"""Lock held while looking and choosing."""


@dataclass(frozen=True, slots=True)
class Lease:
    """A place on a GPU with `number` workers of the role, including the new worker."""

    index: int
    number: int
    descriptor: int  # closing it ends the lease, usually at process end


def placed(config: Config, role: Role) -> Config:
    """Return `config` with the GPU taken by the worker, if the worker may choose and any GPU exists."""
    directory = shared_directory(config.worker.memory_socket)
    if config.worker.device != "auto" or directory is None or not torch.cuda.is_available():
        return config
    uuids = [describe_device(torch.device("cuda", index))[1] for index in range(torch.cuda.device_count())]
    lease = lease_gpu(directory, role, uuids)
    num_sharers = config.kv.prefill_sharers if role is Role.PREFILL else config.kv.decode_sharers
    kind = role.label
    logger.info("on cuda:%d of %d, where this is %s worker %d", lease.index, len(uuids), kind, lease.number)
    if lease.number > num_sharers:
        logger.warning(
            "memory may run out: %d %s workers are on cuda:%d, and the pool leaves room for the steps of %d; give all "
            "workers kv.%s_sharers = %d", lease.number, kind, lease.index, num_sharers, kind, lease.number,
        )  # fmt: skip
    return replace(config, worker=replace(config.worker, device=f"cuda:{lease.index}"))


def lease_gpu(directory: Path, role: Role, uuids: Sequence[str]) -> Lease:
    """Take a place on a GPU of `uuids`."""
    with _locked(directory / CHOICE):
        taken = [{each: _num_taken(directory, uuid, each) for each in Role} for uuid in uuids]
        index = min(range(len(uuids)), key=lambda i: (taken[i][role], sum(taken[i].values()), i))
        for number in count():  # lowest free place
            descriptor = _opened(_place(directory, uuids[index], role, number))
            if _try_lock(descriptor):
                return Lease(index, taken[index][role] + 1, descriptor)
            os.close(descriptor)
    raise AssertionError("places are without end")


def _place(directory: Path, uuid: str, role: Role, number: int) -> Path:
    return directory / f"gpu-{uuid}.{role.label}-{number}.lock"


def _num_taken(directory: Path, uuid: str, role: Role) -> int:
    """Count the locked places of a role on a GPU; files remain when locks are released."""
    num_taken = 0
    for number in count():
        path = _place(directory, uuid, role, number)
        if not path.exists():
            return num_taken
        descriptor = _opened(path)
        num_taken += not _try_lock(descriptor)
        os.close(descriptor)
    raise AssertionError("files end")


def _opened(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    descriptor = _opened(path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
