"""Proof that blocks travel between two workers: a known block is pulled and compared."""

import time
from collections.abc import Callable, Generator, Iterator
from itertools import chain

from common.base.errors import TransferFailed
from common.kv.blocks import Allocator
from common.kv.pool import KVPool
from common.kv.transport import PeerPool, Pull
from common.memory.base.pattern import pattern_pieces
from common.wire.values.kv_layout import Counts

Proof = Generator[None, None, float]
"""A proof under way: a generator to resume again and again; never waits. Its value is GB/s."""

PROOF_TIMEOUT_S = 2.0
"""Longest wait for blocks, and for a pull, which takes milliseconds."""
_AT_MOST = 16
"""A proof takes at most 1/16 of a pool, because heartbeats count its blocks as used."""
_REPEATS = 3


Linger = Callable[[Pull, list[int]], None]
"""Takes a pull that may still write, with its target blocks, which the receiver frees when the pull is over."""


def prove_path(peer: PeerPool, pool_id: int, ours: KVPool, allocator: Allocator, linger: Linger) -> Proof:
    """Pull and compare the proof block of each group, then time a larger pull.

    Raises TransferFailed if the pool does not open, bytes differ or are late, or no block is free to pull into.
    Borrowed blocks are given back, also when the generator is closed; blocks of a late pull are given to `linger`.
    """
    theirs, shape = peer.shape, ours.shape
    while not peer.is_open(ours):
        yield
    measured = _measured(peer, ours)
    yield from _room(allocator, tuple(max(1, count) for count in measured))
    one_each = (max(1, count) for count in map(min, measured, allocator.num_free))
    targets = allocator.allocate(tuple(one_each))
    durations_s = []
    pull: Pull | None = None
    try:
        firsts = [ids[0] for ids in targets]
        pull = peer.pull(theirs.proof_ids, ours, firsts)
        yield from _arrival(pull)
        for proof_id, first in zip(theirs.proof_ids, firsts, strict=True):
            yield from _comparison(ours.read_block(first), pool_id, proof_id)
        target_ids = list(chain.from_iterable(targets))
        sources = (range(first, first + len(ids)) for first, ids in zip(theirs.proof_ids, targets, strict=True))
        source_ids = list(chain.from_iterable(sources))
        for _ in range(_REPEATS):
            pull = peer.pull(source_ids, ours, target_ids)
            yield from _arrival(pull)
            durations_s.append(pull.duration_s())
    finally:
        block_ids = list(chain.from_iterable(targets))
        if pull is None or is_over(pull):
            allocator.free(block_ids)
        else:
            linger(pull, block_ids)
    return sum(shape.place(block_id).num_bytes for block_id in target_ids) / min(durations_s) / 1e9


def is_over(pull: Pull) -> bool:
    """Tell whether a pull writes no more, whether or not all bytes have arrived."""
    try:
        return pull.done()
    except TransferFailed:
        return True


def _measured(peer: PeerPool, ours: KVPool) -> Counts:
    """Return the blocks of each group to pull for timing."""
    num_bytes = peer.proof_bytes // len(ours.blocks)
    wanted = (num_bytes // group.block_bytes for group in ours.layout.groups)
    return tuple(map(min, wanted, peer.shape.capacity, (count // _AT_MOST for count in ours.shape.shares)))


def _room(allocator: Allocator, num_wanted: Counts) -> Iterator[None]:
    """Yield until `num_wanted` blocks are available; after a timeout, one of each group is enough.

    Raises TransferFailed if even those are not available.
    """
    deadline_s = time.monotonic() + PROOF_TIMEOUT_S
    while not allocator.fetch(num_wanted):
        is_late = time.monotonic() > deadline_s
        if is_late and all(allocator.num_free):
            return
        if is_late:
            raise TransferFailed(f"the pool here is full: no block for the proof within {PROOF_TIMEOUT_S:.0f} s")
        yield


def _arrival(pull: Pull) -> Iterator[None]:
    deadline_s = time.monotonic() + PROOF_TIMEOUT_S
    while not pull.done():
        if time.monotonic() > deadline_s:
            raise TransferFailed(f"the proof block did not arrive within {PROOF_TIMEOUT_S:.0f} s")
        yield


def _comparison(arrived: bytes, pool_id: int, block_id: int) -> Iterator[None]:
    begin = 0
    for piece in pattern_pieces(pool_id, block_id, len(arrived)):
        if arrived[begin : begin + len(piece)] != piece:
            raise TransferFailed("the proof block arrived with other bytes than the peer wrote")
        begin += len(piece)
        yield
