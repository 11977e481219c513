import pytest

from common.errors import KVError, OutOfBlocks
from tests.layouts import allocator_of, take


def test_all_or_nothing() -> None:
    allocator = allocator_of(4)
    with pytest.raises(OutOfBlocks, match="5 blocks wanted, 4 of 4 free"):
        allocator.allocate((5,))
    block_ids = take(allocator, 4)
    assert sorted(block_ids) == [1, 2, 3, 4], "the proof block is nobody's"
    assert allocator.num_free == (0,)
    allocator.free(block_ids)
    allocator.check([])


def test_a_block_cannot_be_freed_twice() -> None:
    allocator = allocator_of(4)
    block_ids = take(allocator, 1)
    allocator.free(block_ids)
    with pytest.raises(KVError, match="freed twice"):
        allocator.free(block_ids)
    with pytest.raises(KVError, match="freed twice"):
        allocator.free([0])


def test_check_notices_a_lost_block_and_a_shared_one() -> None:
    allocator = allocator_of(4)
    block_ids = take(allocator, 2)
    allocator.check([block_ids])
    with pytest.raises(KVError):
        allocator.check([])
    with pytest.raises(KVError):
        allocator.check([block_ids, block_ids[:1]])


def test_a_pool_needs_a_block_beside_the_proof_block() -> None:
    with pytest.raises(KVError, match=r"enlarge kv\.pool_bytes"):
        allocator_of(0)
