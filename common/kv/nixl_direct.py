"""Reads of a pool in host memory by an agent: whole blocks, from pool to pool."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from common.kv.pool import KVPool
from common.memory.base.nixl_agent import Agent
from common.memory.client.peer_pool_client import LentClaim

MAX_READ_BLOCKS = 256
"""Blocks of a read. Progress inside a read is invisible, so a long pull is divided."""
MAX_READS = 2
"""Reads under way of a pull: the next begins before the first has ended."""


class _Piece(NamedTuple):
    """Blocks of a read, numbered within their group."""

    group: int
    source_ids: Sequence[int]
    target_ids: Sequence[int]


class DirectReads:
    """Reads of a visit's pulls; raises AgentError. The caller calls `close`, destroys the agent, and calls `free`."""

    def __init__(self, agent: Agent, claim: LentClaim, target: KVPool) -> None:
        self._agent = agent
        self._lists: list[tuple[int, int]] = []  # prepared blocks of each group: ours, theirs
        address = target.memory.data_ptr()
        agent.register(address, target.memory.numel())
        peer = agent.meet(claim.metadata)
        for ours, theirs in zip(target.blocks, claim.shape.layout.groups, strict=True):
            count = claim.shape.num_bytes // theirs.block_bytes
            mine = agent.blocks("", address, ours.shape[1], len(ours))
            self._lists.append((mine, agent.blocks(peer, claim.address, theirs.block_bytes, count)))

    def begin(self, groups: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Callable[[], bool]:
        """Begin the reads of a pull; the result goes on with them, and tells whether all bytes are in the pool."""
        pieces, reads = deque(_pieces(groups)), deque[int]()

        def is_over() -> bool:
            while reads and self._agent.is_read(reads[0]):
                reads.popleft()
            while pieces and len(reads) < MAX_READS:
                group, source_ids, target_ids = pieces.popleft()
                ours, theirs = self._lists[group]
                reads.append(self._agent.read(ours, target_ids, theirs, source_ids))
            return not reads

        return is_over

    def close(self) -> None:
        """Do nothing, because only the end of the agent ends a read."""

    def free(self) -> None:
        """Do nothing, because the pool is the worker's."""


def _pieces(groups: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Iterator[_Piece]:
    for number, (source_ids, target_ids) in enumerate(groups):
        for begin in range(0, len(source_ids), MAX_READ_BLOCKS):
            end = begin + MAX_READ_BLOCKS
            yield _Piece(number, source_ids[begin:end], target_ids[begin:end])
