"""How KV blocks get from a prefill worker's pool into a decode worker's: the protocol and the choices.

The decode worker pulls. A transport is one file with a `Transport` in it and one line in
`TRANSPORTS`: memory that can be mapped by another process, and the opening of a peer's memory.
Handles are opaque bytes to everyone else. Nothing is sent per request but block ids.
"""

import importlib
from dataclasses import dataclass
from typing import Protocol

import torch

from common.errors import ConfigError, LayoutMismatch, TransferFailed
from common.kv.pool import KVPool, PoolMemory
from common.wire.handoff_messages import KVPoolExport
from common.wire.pool_shape import PoolShape, shown


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

    def allocate(self, num_bytes: int, device: torch.device, label: str) -> PoolMemory:
        """Memory for a pool; `label` (worker id and epoch) names it where the system shows names."""
        ...

    def open_peer(self, export: KVPoolExport, device: torch.device) -> PeerPool:
        """Map a peer's pool; raises TransferFailed naming the reason and the remedy."""
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


class SharedPeerPool:
    """A peer's pool that is ours, too: its blocks change hands, and nothing is copied."""

    def __init__(self, shape: PoolShape) -> None:
        self.shape = shape

    def pull(self, source_ids: list[int], target: KVPool, target_ids: list[int]) -> Pull:
        raise TransferFailed("both workers share a pool, in which blocks are offered and not pulled")

    def close(self) -> None:
        """There is nothing to unmap."""


def shape_of(export: KVPoolExport) -> PoolShape:
    """Of a peer's pool."""
    return PoolShape(export.layout, export.num_blocks)


def pairs_by_group(
    theirs: PoolShape, source_ids: list[int], ours: PoolShape, target_ids: list[int]
) -> list[tuple[list[int], list[int]]]:
    """Blocks to copy and those to copy into, counted within each group; raises TransferFailed if groups differ."""
    sources, targets = theirs.within_groups(source_ids), ours.within_groups(target_ids)
    if [len(ids) for ids in sources] != [len(ids) for ids in targets]:
        raise TransferFailed(
            f"{shown(tuple(map(len, sources)))} blocks of the peer are to be copied into "
            f"{shown(tuple(map(len, targets)))} of ours"
        )
    return list(zip(sources, targets, strict=True))


def check_size(export: KVPoolExport, num_bytes: int) -> None:
    """Raise TransferFailed when a peer's memory, of `num_bytes`, is smaller than the pool that it offers."""
    wanted = shape_of(export).num_bytes
    if num_bytes < wanted:
        raise TransferFailed(
            f"worker {export.worker_id} offers {shown(export.num_blocks)} blocks, which are {wanted} bytes, its memory "
            f"has {num_bytes}; restart that worker"
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
