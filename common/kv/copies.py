"""Copies of a prompt's blocks into this worker's pool, in a pull or several."""

from collections.abc import Sequence
from operator import mul
from typing import NamedTuple

from common.base.errors import TransferFailed
from common.kv.pool import KVPool
from common.kv.tables import Tables
from common.kv.transport import PeerPool, Pull
from common.wire.values.pool_shape import PoolShape


class Missing(NamedTuple):
    """Blocks still to copy, and their targets."""

    source_ids: list[int]
    target_ids: list[int]


def missing(tables: Tables, source_ids: Sequence[Sequence[int]], here: Sequence[Sequence[int]]) -> Missing:
    """Return blocks of a prompt not yet copied; each table's first blocks match `here`, by group."""
    rest, targets = list[int](), list[int]()
    for table, ids, of_group in zip(tables, source_ids, here, strict=True):
        rest += ids[len(of_group) :]
        targets += table.held[len(of_group) : len(ids)]
    return Missing(rest, targets)


class Copies:
    """Pulls of a prompt's blocks; `problem` tells why some will not arrive."""

    def __init__(self) -> None:
        self.problem = ""
        self.num_pulls = self.num_bytes = 0  # arrived
        self.seconds = 0.0  # spent on arrived pulls
        self._under_way: list[tuple[Pull, int]] = []  # pulls and their bytes

    def start(self, source_pool: PeerPool, source_ids: list[int], pool: KVPool, target_ids: list[int]) -> None:
        """Begin a pull; a failure to begin sets `problem`."""
        try:
            self._under_way.append(
                (source_pool.pull(source_ids, pool, target_ids), _num_bytes(source_pool.shape, source_ids))
            )
        except TransferFailed as error:
            self.problem = str(error)

    def over(self) -> bool:
        """Tell whether no pull is under way; all blocks have arrived unless `problem` is set."""
        self._under_way = [under_way for under_way in self._under_way if not self._ended(*under_way)]
        return not self._under_way

    def _ended(self, pull: Pull, num_bytes: int) -> bool:
        try:
            if not pull.done():
                return False
        except TransferFailed as error:
            self.problem = str(error)
            return True
        self.num_pulls += 1
        self.num_bytes += num_bytes
        self.seconds += pull.duration_s()
        return True


def _num_bytes(shape: PoolShape, block_ids: Sequence[int]) -> int:
    sizes = (group.block_bytes for group in shape.layout.groups)
    return sum(map(mul, sizes, shape.count(block_ids)))
