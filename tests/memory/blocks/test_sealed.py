"""Blocks that nobody writes any more: who finds them, who reads them, which go first, and what is refused."""

from collections.abc import Callable

import numpy as np
import pytest

from common.base.errors import KVError
from common.memory.blocks.answers import ProtocolError
from common.memory.blocks.index import BlockIndex
from common.memory.blocks.lease_table import FREE
from common.memory.blocks.offers import OfferKey
from common.memory.client.lease_cache import LeaseCache
from common.wire.messages.memory import BlocksFreed, BlocksLeased, BlocksSealed, MemoryMessage, PromptBlocks
from common.wire.values.kv_layout import KVLayout
from common.wire.values.packing import pack_ids, unpack_ids
from common.wire.values.pool_shape import PoolShape
from tests.memory.parties import references_of
from tests.support.allocator import check_owned
from tests.support.layouts import one_group, window

LAYOUT = one_group("model", 1, 1, 1, 1, "float16")
WRITER, READER, OTHER = 0, 1, 2
KEYS = [bytes([number]) * 16 for number in range(12)]


def list_of(block_ids: np.ndarray) -> list[int]:
    ids: list[int] = block_ids.tolist()
    return ids


def written(index: BlockIndex, keys: list[bytes], client: int = WRITER) -> list[int]:
    """Blocks of a text, sealed under these keys, which a client reads."""
    block_ids = index.lease(client, (len(keys),))
    index.seal(client, block_ids, index.leases.generation[block_ids], b"".join(keys))
    return list_of(block_ids)


def match(index: BlockIndex, client: int, keys: list[bytes]) -> list[int]:
    found = index.sealed.find(b"".join(keys)).block_ids
    index.sealed.read(client, found)
    return list_of(found)


def lease(index: BlockIndex, client: int, count: int) -> list[int]:
    return list_of(index.lease(client, (count,)))


def flags(num_sealed: int, num_blocks: int) -> np.ndarray:
    """Of an offer whose first blocks are sealed."""
    return np.arange(num_blocks) < num_sealed


def named(index: BlockIndex, block_ids: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """With their generations."""
    ids = np.array(block_ids, np.intp)
    return ids, index.leases.generation[ids]


def let_go(index: BlockIndex, client: int, block_ids: list[int]) -> None:
    index.free(client, *named(index, block_ids))


@pytest.fixture
def index() -> BlockIndex:
    return BlockIndex(PoolShape(LAYOUT, (9,)))


def test_a_text_finds_the_blocks_it_begins_with_and_none_beyond_a_gap(index: BlockIndex) -> None:
    block_ids = written(index, KEYS[:3])
    assert match(index, READER, KEYS[:5]) == block_ids
    assert match(index, READER, [KEYS[0], KEYS[7], KEYS[1]]) == block_ids[:1]
    assert match(index, READER, [KEYS[7], KEYS[0]]) == []
    assert references_of(index.sealed, READER) == {block_ids[0]: 2, block_ids[1]: 1, block_ids[2]: 1}


def test_what_nobody_reads_is_there_until_it_is_wanted_and_goes_from_its_end(index: BlockIndex) -> None:
    older, newer = written(index, KEYS[:3]), written(index, KEYS[3:5])
    let_go(index, WRITER, older)
    let_go(index, WRITER, newer)
    assert index.num_free == (8,) and index.sealed.num_cached == (5,)
    assert match(index, READER, KEYS[3:5]) == newer, "which is not for others now"
    assert index.num_free == (6,)
    leased = lease(index, OTHER, 4)
    assert older[2] in leased and not set(leased) & {older[0], older[1]}
    assert match(index, READER, KEYS[:3]) == older[:2], "its end is gone"
    let_go(index, READER, older[:2])
    lease(index, OTHER, 2)
    assert match(index, READER, KEYS[:3]) == [] and match(index, READER, KEYS[3:5]) == newer


def test_the_second_block_of_a_key_is_its_writers_alone(index: BlockIndex) -> None:
    [first], [second] = written(index, KEYS[:1]), written(index, KEYS[:1], OTHER)
    assert match(index, READER, KEYS[:1]) == [first]
    let_go(index, OTHER, [second])
    assert index.leases.claim(second) == FREE and not any(index.sealed.num_cached)
    let_go(index, WRITER, [first])
    let_go(index, READER, [first])
    assert index.sealed.cached[0].block_ids.tolist() == [first]


def test_what_one_that_was_let_go_reads_stays_until_its_process_is_over(index: BlockIndex) -> None:
    block_ids = written(index, KEYS[:8])
    assert index.leave(WRITER) == 0 and index.num_free == (0,)
    index.reclaim(WRITER)
    assert index.num_free == (8,) and match(index, READER, KEYS) == block_ids


def test_what_was_offered_to_one_that_was_let_go_stays_too_as_it_may_have_accepted(index: BlockIndex) -> None:
    block_ids = written(index, KEYS[:2])
    index.offer(WRITER, OfferKey(READER, "r", 0), *named(index, block_ids), flags(2, 2))
    assert index.leave(READER) == 0 and index.num_free == (6,)
    index.reclaim(READER)
    assert index.num_free == (8,) and match(index, OTHER, KEYS) == block_ids


def test_what_is_let_go_at_once_goes_from_the_end_of_each_text(index: BlockIndex) -> None:
    """Of one message, which names what two texts have in common twice, and of one that is gone."""
    let_go(index, WRITER, lease(index, WRITER, 8))  # so that ids of a text do not ascend
    block_ids = written(index, KEYS[:3])
    shared = match(index, WRITER, KEYS[:2])
    other = written(index, KEYS[3:5])
    let_go(index, WRITER, [*shared, *block_ids, *other])
    assert index.sealed.cached[0].block_ids.tolist() == [*other[::-1], *block_ids[::-1]]
    for keys in (KEYS[:3], KEYS[:2], KEYS[3:5]):
        match(index, READER, keys)
    assert not any(index.sealed.num_cached) and references_of(index.sealed, READER)[block_ids[0]] == 2
    own = written(index, KEYS[:1], READER)
    index.leave(READER)
    index.reclaim(READER)
    assert index.sealed.cached[0].block_ids.tolist() == [*other[::-1], *block_ids[::-1]]
    assert index.leases.claim(own[0]) == FREE and index.num_free == (8,)


def test_a_key_that_is_named_twice_is_its_first_blocks(index: BlockIndex) -> None:
    first, second = written(index, [KEYS[0], KEYS[0]])
    assert match(index, READER, [KEYS[0], KEYS[0]]) == [first, first]
    let_go(index, WRITER, [second, first])
    assert index.leases.claim(second) == FREE and references_of(index.sealed, READER) == {first: 2}
    let_go(index, READER, [first, first])
    assert index.sealed.cached[0].block_ids.tolist() == [first]


def test_an_offer_takes_what_is_sealed_along(index: BlockIndex) -> None:
    block_ids, [last] = written(index, KEYS[:2]), lease(index, WRITER, 1)
    offered, key = [*block_ids, last], OfferKey(READER, "r", 0)
    for named_ids, num_sealed in ((offered, 1), (offered, 3), ([last, *block_ids], 2)):
        with pytest.raises(ProtocolError, match="marks other blocks as sealed"):
            index.offer(WRITER, key, *named(index, named_ids), flags(num_sealed, 3))
    index.offer(WRITER, key, *named(index, offered), flags(2, 3))
    index.leave(WRITER)
    index.reclaim(WRITER)
    assert index.num_free == (5,), "who offered it need not be there"
    index.accept(key)
    assert references_of(index.sealed, READER) == dict.fromkeys(block_ids, 1) and index.leases.num_leased[READER] == 1
    index.offer(READER, key, *named(index, offered), flags(2, 3))
    index.decline(key)
    assert index.num_free == (8,) and match(index, OTHER, KEYS) == block_ids


def test_what_is_said_of_the_wrong_blocks_is_refused_and_changes_nothing(index: BlockIndex) -> None:
    block_ids = written(index, KEYS[:2])
    last, ids = lease(index, WRITER, 1), np.array(block_ids, np.intp)
    refused: list[tuple[str, Callable[[], None]]] = [
        ("sealed already", lambda: index.seal(WRITER, *named(index, [*last, *block_ids]), b"".join(KEYS[:3]))),
        ("so often", lambda: index.free(READER, *named(index, block_ids))),
        ("so often", lambda: index.free(WRITER, *named(index, [*block_ids, *last, *block_ids]))),
        ("twice", lambda: index.free(WRITER, *named(index, [*last, *block_ids, *last]))),
        ("of generation 1, not 2", lambda: index.free(WRITER, ids, np.array([2, 2], np.int32))),
        ("of generation 1, not 2", lambda: index.free(WRITER, ids, np.array([1, 2], np.int32))),
        ("FREE", lambda: index.seal(WRITER, *named(index, [*last, 6]), b"".join(KEYS[:2]))),
    ]
    for problem, say in refused:
        with pytest.raises(ProtocolError, match=problem):
            say()
    assert references_of(index.sealed, WRITER) == dict.fromkeys(block_ids, 1)
    assert index.leases.num_leased[WRITER] == 1 and index.num_free == (5,)
    two = BlockIndex(PoolShape(KVLayout("model", (LAYOUT.groups[0], window(2, 3, 2))), (4, 4)))
    with pytest.raises(ProtocolError, match="cannot be used again"):
        two.seal(WRITER, *named(two, two.lease(WRITER, (1, 0)).tolist()), KEYS[0])


def test_a_worker_reads_what_it_has_sealed_and_lets_it_go_with_its_text() -> None:
    said = list[MemoryMessage]()
    leases = LeaseCache(PoolShape(LAYOUT, (9,)), said.append)
    leases.receive(BlocksLeased(pack_ids([3, 4, 5]), pack_ids([7, 8, 9])))
    [text] = leases.allocate((3,))
    leases.seal(text[:2], [bytes([1]) * 32, bytes([2]) * 32])
    [sealed] = said
    assert isinstance(sealed, BlocksSealed) and sealed.keys == b"".join(KEYS[1:3])
    assert unpack_ids(sealed.block_ids) == text[:2] and leases.in_use == text[2:]
    assert leases.granted(PromptBlocks("r", 0, sealed.block_ids, sealed.generations, 2, 2, 2)) == (
        [text[:2]],
        [[]],
        2,
        2,
    )
    check_owned(leases, [text, text[:2]])
    assert leases.num_unused == (5,)
    with pytest.raises(KVError):
        leases.seal(text[:1], [bytes(32)])
    leases.free(text)
    leases.free(text[:2])
    with pytest.raises(KVError):
        leases.free(text[:1])
    assert leases.num_free == (1,), "what is sealed is of no use here"
    leases.update((1,), (0,))
    freed = said[1]
    assert isinstance(freed, BlocksFreed) and unpack_ids(freed.block_ids) == text[:2] * 2
    assert unpack_ids(freed.generations) == unpack_ids(sealed.generations) * 2
    assert leases.num_unused == (8,)
