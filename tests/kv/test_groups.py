"""Blocks of several groups between two pools in real memory: each arrives in its own place, byte for byte."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from common.base.errors import LayoutMismatch, TransferFailed
from common.kv.pool import KVPool
from common.kv.proof import prove_path
from common.kv.shm import ShmPeerPool
from common.kv.transport import check_compatible
from common.memory.base.pattern import pattern
from common.memory.client.client import PoolClaim
from common.memory.client.mapping import Mapping
from common.memory.devices.host_backing import HostMemory
from common.wire.values.kv_layout import Counts, KVLayout
from common.wire.values.pool_shape import PoolShape
from tests.support.allocator import BlockAllocator, disjoint_ids, no_linger
from tests.support.layouts import full, latent, state, window
from tests.support.messages import pool_export

CPU, POOL_ID = torch.device("cpu"), 77
LAYOUTS = {
    "windowed": KVLayout("model", (full(2, 2, 8, 16, "bfloat16"), window(8, 30, 5))),
    "hybrid": KVLayout("model", (full(1, 1, 16, 16, "float32"), window(4, 9, 3), state(1001))),
    "latent": KVLayout("model", (latent(16, 72),)),
}


@dataclass
class Pools:
    """A peer's, of other sizes than ours, and ours."""

    theirs: KVPool
    ours: KVPool
    peer: ShmPeerPool
    memory: HostMemory

    @staticmethod
    def of(layout: KVLayout) -> "Pools":
        shape = PoolShape(layout, tuple(9 + 2 * i for i in range(len(layout.groups))))
        memory, ours = HostMemory(shape.num_bytes), made(layout, (12, 10, 7))
        claim = PoolClaim(b"", memory.descriptor, shape.num_bytes, POOL_ID, shape)
        theirs = KVPool(shape, Mapping(claim, CPU).tensor(writable=True))
        for blocks in theirs.blocks:
            blocks.copy_(torch.randint(0, 256, blocks.shape, dtype=torch.uint8))
        for proof_id in theirs.shape.proof_ids:
            write(theirs, proof_id, pattern(POOL_ID, proof_id, shape.place(proof_id).num_bytes))
        return Pools(theirs, ours, ShmPeerPool(claim, "p"), memory)

    def close(self) -> None:
        self.peer.close()
        self.memory.close()


def made(layout: KVLayout, num_blocks: Counts) -> KVPool:
    shape = PoolShape(layout, num_blocks[: len(layout.groups)])
    return KVPool(shape, torch.empty(shape.num_bytes, dtype=torch.uint8))


def write(pool: KVPool, block_id: int, data: bytearray) -> None:
    pool.block(block_id).copy_(torch.frombuffer(data, dtype=torch.uint8))


@pytest.fixture(params=LAYOUTS.values(), ids=list(LAYOUTS))
def pools(request: pytest.FixtureRequest) -> Iterator[Pools]:
    pools = Pools.of(request.param)
    yield pools
    pools.close()


def scattered(shape: PoolShape, counts: Counts, rng: random.Random) -> list[int]:
    """So many blocks of each group, in any order within it, none over another."""
    ids = disjoint_ids(shape)
    return [block_id for of_group, count in zip(ids, counts, strict=True) for block_id in rng.sample(of_group, count)]


@pytest.mark.parametrize("seed", range(5))
def test_blocks_of_every_group_arrive_and_no_other_is_touched(pools: Pools, seed: int) -> None:
    rng, num_groups = random.Random(seed), len(pools.ours.blocks)
    counts = tuple(rng.randint(0, 6) for _ in range(num_groups))
    sources = scattered(pools.theirs.shape, counts, rng)
    targets = scattered(pools.ours.shape, counts, rng)
    for blocks in pools.ours.blocks:
        blocks.fill_(0xAB)
    assert pools.peer.pull(sources, pools.ours, targets).done()
    wanted = bytearray(b"\xab" * pools.ours.shape.num_bytes)
    for target, source in zip(targets, sources, strict=True):
        offset, num_bytes = pools.ours.shape.place(target)
        wanted[offset : offset + num_bytes] = pools.theirs.read_block(source)
    assert pools.ours.memory.numpy().tobytes() == wanted


def test_caches_are_the_blocks_of_their_group_as_kernels_see_them(pools: Pools) -> None:
    shape = pools.ours.shape
    chosen = [ids[3] for ids in disjoint_ids(shape)]
    [indexes] = zip(*shape.within_groups(chosen), strict=True)
    for number, group in enumerate(shape.layout.groups):
        cache, index = pools.ours.caches[number], indexes[number]
        assert cache.shape == (shape.num_bytes // group.block_bytes, *group.block_shape)
        cache[index] = number + 1
        assert pools.ours.read_block(chosen[number]) == cache[index].contiguous().view(torch.uint8).numpy().tobytes()
    for number, cache in enumerate(pools.ours.caches):
        assert bool((cache[indexes[number]] == number + 1).all()), "blocks of different groups do not overlap"


def test_the_path_of_every_group_is_proven(pools: Pools) -> None:
    allocator = BlockAllocator(pools.ours.shape)
    for group in range(len(pools.ours.blocks)):
        proof_id = pools.theirs.shape.proof_ids[group]
        kept = bytearray(pools.theirs.read_block(proof_id))
        assert is_proven(pools, allocator)
        write(pools.theirs, proof_id, bytearray(len(kept)))
        assert not is_proven(pools, allocator)
        write(pools.theirs, proof_id, kept)
    allocator.check([])


def is_proven(pools: Pools, allocator: BlockAllocator) -> bool:
    try:
        for _ in prove_path(pools.peer, POOL_ID, pools.ours, allocator, no_linger):
            pass
    except TransferFailed as error:
        assert "other bytes" in str(error)
        return False
    return True


def test_a_block_is_copied_into_one_of_its_group_or_not_at_all() -> None:
    pools = Pools.of(LAYOUTS["hybrid"])
    last = pools.theirs.shape.num_ids - 1
    with pytest.raises(
        TransferFailed, match=r"1 \+ 0 \+ 1 blocks of the peer are to be copied into 2 \+ 0 \+ 0 of ours"
    ):
        pools.peer.pull([1, last], pools.ours, [1, 2])
    with pytest.raises(TransferFailed, match="the peer has"):
        pools.peer.pull([last + 1], pools.ours, [pools.ours.shape.num_ids - 1])
    pools.close()


def test_groups_that_differ_are_named() -> None:
    pools = Pools.of(LAYOUTS["windowed"])
    other = made(KVLayout("model", (full(2, 2, 8, 16, "bfloat16"), window(8, 31, 5))), (4, 4))
    with pytest.raises(LayoutMismatch, match=r"groups\[1\]\.window: 31 here, 30 there"):
        check_compatible(pool_export("p", layout=pools.theirs.layout), other, "shm")
    pools.close()
