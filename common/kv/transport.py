"""How KV blocks get from a prefill worker's pool into a decode worker's: the protocol and the choices.

The decode worker pulls. A transport is one file with a `Transport` in it and one line in `TRANSPORTS`: how memory of
another process's memory server is mapped. Nothing is sent per request but block ids.
"""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from common.base.errors import ConfigError, LayoutMismatch, TransferFailed
from common.kv.pool import KVPool
from common.memory.client.client import PoolClaim
from common.wire.messages.handoff import KVPoolExport
from common.wire.values.pool_shape import PoolShape, shown


class Pull(Protocol):
    """A copy of blocks under way."""

    def done(self) -> bool:
        """True once every byte has arrived; raises TransferFailed when no more will be written, yet some is missing."""
        ...

    def duration_s(self) -> float:
        """How long a copy that is done took, in seconds."""
        ...


class PeerPool(Protocol):
    """A peer's pool, mapped into this process."""

    shape: PoolShape

    def pull(self, source_ids: list[int], target: KVPool, target_ids: list[int]) -> Pull:
        """Start copying whole blocks, each into one of the same group, which are in the same order in both lists.

        Returns at once. Raises TransferFailed when it cannot, as for ids of no block.
        """
        ...

    def close(self) -> None:
        """Unmap; no pull may be under way."""
        ...


class Transport(Protocol):
    """One way of moving blocks."""

    name: str

    def open_peer(self, claim: PoolClaim, worker_id: str, device: torch.device) -> PeerPool:
        """Map the pool of a worker there; raises TransferFailed naming the reason and the remedy.

        The claim's descriptor, if it has one, stays the caller's, who closes it after the pool.
        """
        ...


@dataclass(frozen=True, slots=True)
class _Choice:
    module: str
    device_type: str


TRANSPORTS = {
    "cuda_ipc": _Choice("common.kv.cuda_ipc", "cuda"),
    "shm": _Choice("common.kv.shm", "cpu"),
}


def make_transport(name: str, device: torch.device) -> Transport:
    """The transport called `name`; `auto` and `none` take the one whose memory lives on `device`."""
    if name in ("auto", "none"):
        name = next(known for known, choice in TRANSPORTS.items() if choice.device_type == device.type)
    choice = TRANSPORTS[name]
    if choice.device_type != device.type:
        raise ConfigError(f"kv.transport = {name} moves {choice.device_type} memory, this worker runs on {device.type}")
    transport: Transport = importlib.import_module(choice.module).TRANSPORT
    return transport


def pairs_by_group(
    theirs: PoolShape, source_ids: list[int], ours: PoolShape, target_ids: list[int]
) -> list[tuple[Sequence[int], Sequence[int]]]:
    """Blocks to copy and those to copy into, counted within each group; raises TransferFailed if groups differ."""
    sources, targets = theirs.within_groups(source_ids), ours.within_groups(target_ids)
    if [len(ids) for ids in sources] != [len(ids) for ids in targets]:
        raise TransferFailed(
            f"{shown(tuple(map(len, sources)))} blocks of the peer are to be copied into "
            f"{shown(tuple(map(len, targets)))} of ours"
        )
    return list(zip(sources, targets, strict=True))


def check_size(claim: PoolClaim, worker_id: str, num_bytes: int) -> None:
    """Raise TransferFailed when memory of `num_bytes` is smaller than the pool that is said to be there."""
    if num_bytes < claim.num_bytes:
        raise TransferFailed(
            f"the pool of worker {worker_id} has {shown(claim.shape.num_blocks)} blocks, which are {claim.num_bytes} "
            f"bytes, its memory has {num_bytes}; restart its memory server"
        )


def check_compatible(export: KVPoolExport, target: KVPool, transport: str) -> None:
    """Raise LayoutMismatch naming every difference between a peer's pool and ours."""
    differences = target.layout.differences(export.layout)
    if export.transport != transport:
        differences.append(f"transport: {export.transport!r} there, {transport!r} here")
    if differences:
        raise LayoutMismatch(
            f"worker {export.worker_id} has another KV layout ({'; '.join(differences)}); "
            "start both workers with the same model and [kv] section"
        )
