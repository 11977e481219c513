"""Blocks of a pool that a worker reads, and nobody writes: how often, as several of its texts may begin alike."""

from collections import Counter
from collections.abc import Iterable, Sequence

from common.errors import KVError


class Readings:
    """As the memory server counts them, too."""

    def __init__(self) -> None:
        self.num_readings: Counter[int] = Counter()  # by block
        self._generation: dict[int, int] = {}

    def __len__(self) -> int:
        """Blocks, however often they are read."""
        return len(self._generation)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._generation

    def num_first(self, block_ids: Iterable[int]) -> int:
        """How many from the first on are among them: of a text those come first."""
        count = 0
        for block_id in block_ids:
            if block_id not in self._generation:
                break
            count += 1
        return count

    def add(self, block_ids: Sequence[int], generations: Sequence[int]) -> None:
        """Each is read once more."""
        self.num_readings.update(block_ids)
        self._generation.update(zip(block_ids, generations, strict=True))

    def generations(self, block_ids: Sequence[int]) -> list[int]:
        return [self._generation[block_id] for block_id in block_ids]

    def take(self, block_ids: Sequence[int]) -> list[int]:
        """Each is read once less; their generations. Raises KVError, and changes nothing, if one is not so often."""
        if not Counter(block_ids) <= self.num_readings:
            raise KVError(f"of {len(block_ids)} blocks some are not read here so often")
        generations = self.generations(block_ids)
        for block_id in block_ids:
            self.num_readings[block_id] -= 1
            if not self.num_readings[block_id]:
                del self.num_readings[block_id], self._generation[block_id]
        return generations
