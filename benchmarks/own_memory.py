"""A memory server for a single process, because an engine without a fleet also needs a server."""

import select
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from common.base.errors import MemoryLost
from common.device.engine.engine import resolve_device
from common.memory.client.client import MemoryClient
from common.memory.client.shared_pool import SharedPool
from common.memory.client.starter import Starter
from common.settings.config import Config, NetSection
from common.settings.memory_sections import MemorySection
from common.wire.values.kv_layout import Counts
from common.wire.values.pool_shape import PoolShape

LINGER_S = 10.0
"""Time until the server ends after its worker was killed."""
END_S = 30.0


def require_gpu(device: str = "cuda") -> None:
    """Exit with status 2 if `device` names a GPU and there is none."""
    if device.startswith("cuda") and not torch.cuda.is_available():
        print("this benchmark needs a CUDA GPU", file=sys.stderr)
        raise SystemExit(2)


@contextmanager
def own_memory(device: str, net: NetSection | None = None) -> Iterator[MemoryClient]:
    """Start a memory server for `device` (as in `worker.device`) and yield a client; both end with the context."""
    with tempfile.TemporaryDirectory(prefix="baton-") as directory:
        path = Path(directory) / "memory.sock"
        net = replace(net or NetSection(), router_endpoint=f"ipc://{directory}/router")  # without a router
        starter = Starter(path, Config(net=net, memory=MemorySection(linger_s=LINGER_S)), str(resolve_device(device)))
        client = MemoryClient(path, "alone", 1, is_decoding=True, summon=starter)
        try:
            yield client
        finally:
            client.close()
            if starter.process is not None:
                starter.process.terminate()
                starter.process.wait(END_S)


def take_all(shared: SharedPool) -> None:
    """Lease every block of a pool that no other client uses, of several groups as texts of usual length have them."""
    leases, end_s = shared.leases, time.monotonic() + END_S
    counts = usual(leases.shape)
    while not leases.fetch(counts):
        if time.monotonic() > end_s:
            raise MemoryLost("not all blocks of the pool have come")
        leases.update(leases.shape.layout.nothing, leases.shape.layout.nothing)
        select.select([shared], [], [], 1.0)
        shared.receive()


def usual(shape: PoolShape) -> Counts:
    """Return the blocks of each group of which a pool is full with texts of usual length."""
    counts = shape.shares
    while not shape.fits(counts):
        counts = tuple(max(1, count * 99 // 100) for count in counts)
    return counts


def separate(shape: PoolShape, counts: Counts) -> list[list[int]]:
    """Return blocks of each group that share no byte with blocks of others, at least `counts`, which must fit."""
    begin, blocks = len(counts), list[list[int]]()
    for group, count in enumerate(counts):
        num_more = max(0, -(-(count + 1) // shape.slabs.num_in_each[group]) - 1)
        slabs = [group, *range(begin, begin + num_more)]  # the slab of the proof block first
        begin += num_more
        blocks.append([i for slab in slabs for i in shape.ids_in(group, slab)][1:])
    return blocks
