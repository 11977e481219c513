"""Transport of KV blocks from a prefill worker's pool to a decode worker's: interface and choice.

The decode worker pulls. A transport is a file with `open_peer`, and a line in `TRANSPORTS`; it reads memory of another
memory server. Requests send only block ids. `nixl` reads pools of other hosts, the others pools of their own host.
"""

import importlib
from collections.abc import Callable, Sequence
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
        """Tell whether every byte has arrived; raises TransferFailed if bytes are missing and none will come.

        Until then target blocks belong to the pull, because bytes may still arrive.
        """
        ...

    def duration_s(self) -> float:
        """Return the duration of a finished copy, in seconds."""
        ...


class PeerPool(Protocol):
    """A peer's pool, readable from this process."""

    shape: PoolShape
    proof_bytes: int  # worth timing, to measure the rate

    def is_open(self, target: KVPool) -> bool:
        """Tell whether blocks can be pulled into `target`; the first call begins what that takes.

        Raises TransferFailed if it cannot be done, or not in time.
        """
        ...

    def pull(self, source_ids: list[int], target: KVPool, target_ids: list[int]) -> Pull:
        """Begin to copy whole blocks, in order, each to a block of equal group; return at once. The pool is open.

        Raises TransferFailed if the copy cannot begin, for example for invalid ids.
        """
        ...

    def close(self) -> None:
        """Let go of the pool. Pulls under way go on to say when they are over."""
        ...


@dataclass(frozen=True, slots=True)
class Transport:
    """A way of moving blocks.

    open_peer: maps the claimed pool of a worker, called by worker id, for a device. Raises TransferFailed with reason
    and remedy. The claim's descriptor stays the caller's, who closes it after the pool.
    """

    name: str
    open_peer: Callable[[PoolClaim, str, torch.device], PeerPool]


TRANSPORTS = {"cuda_ipc": ("cuda",), "shm": ("cpu",), "nixl": ("cpu", "cuda")}
"""Types of devices by the name of a transport, and of its file; the first one for a device is its usual one."""
NIXL = "nixl"


def make_transport(name: str, device: torch.device) -> Transport:
    """Return the transport called `name`; `auto` and `none` mean the transport for `device`.

    Raises ConfigError if the transport does not fit the device.
    """
    if name in ("auto", "none"):
        name = next(known for known, device_types in TRANSPORTS.items() if device.type in device_types)
    if device.type not in TRANSPORTS[name]:
        moves = " and ".join(TRANSPORTS[name])
        raise ConfigError(f"kv.transport = {name} moves {moves} memory, this worker runs on {device.type}")
    return Transport(name, importlib.import_module(f"common.kv.{name}").open_peer)


def pairs_by_group(
    theirs: PoolShape, source_ids: list[int], ours: PoolShape, target_ids: list[int]
) -> list[tuple[Sequence[int], Sequence[int]]]:
    """Return source and target blocks of each group, counted within the group.

    Raises TransferFailed for ids outside the peer's pool, or if the numbers of blocks differ in a group.
    """
    if source_ids and not 0 <= min(source_ids) <= max(source_ids) < theirs.num_ids:
        raise TransferFailed(f"block ids {min(source_ids)} to {max(source_ids)}, the peer has {theirs.num_ids}")
    sources, targets = theirs.within_groups(source_ids), ours.within_groups(target_ids)
    if [len(ids) for ids in sources] != [len(ids) for ids in targets]:
        raise TransferFailed(
            f"{shown(tuple(map(len, sources)))} blocks of the peer are to be copied into "
            f"{shown(tuple(map(len, targets)))} of ours"
        )
    return list(zip(sources, targets, strict=True))


def check_size(claim: PoolClaim, worker_id: str, num_bytes: int) -> None:
    """Raise TransferFailed if memory of `num_bytes` is smaller than the claimed pool."""
    if num_bytes < claim.num_bytes:
        raise TransferFailed(
            f"the pool of worker {worker_id} has {shown(claim.shape.num_blocks)} blocks, which are {claim.num_bytes} "
            f"bytes, its memory has {num_bytes}; restart its memory server"
        )


def check_compatible(export: KVPoolExport, target: KVPool, transport: str) -> None:
    """Raise LayoutMismatch with all differences between a peer's pool and ours.

    Transports agree if they are the same, or if one is `nixl`, which either side may choose for a path.
    """
    differences = target.layout.differences(export.layout)
    if export.transport != transport and NIXL not in (export.transport, transport):
        differences.append(f"transport: {export.transport!r} there, {transport!r} here")
    if differences:
        raise LayoutMismatch(
            f"worker {export.worker_id} has another KV layout ({'; '.join(differences)}); "
            "start both workers with the same [model] and [kv] section, and on devices of one kind"
        )
