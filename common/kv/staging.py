"""Order of staged pulls: what each slot is doing, and which blocks are next. Knows no device and no network.

    free ──▶ filled there ──▶ read ──▶ copied into the pool ──▶ free

A slot is a place there, and the same place here. Slots go on independently, so copies
there, reads and copies here overlap. A slot is filled again only after the copy here, so after the read, has ended.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from common.wire.values.pool_shape import PoolShape


class Piece(NamedTuple):
    """Blocks of a slot, one after the other."""

    source_ids: list[int]
    target_ids: list[int]
    num_bytes: int


class Steps(Protocol):
    """Work on slots; each call begins work and returns at once."""

    def stage(self, number: int, slot: int, piece: Piece) -> None:
        """Have the blocks copied into the slot there; `number` is new."""
        ...

    def staged(self) -> Iterable[int]:
        """Return the numbers of slots that are filled."""
        ...

    def read(self, slot: int, piece: Piece) -> int:
        """Read the slot; return a handle."""
        ...

    def is_read(self, handle: int) -> bool:
        """Tell whether a read has ended; the handle is void afterwards."""
        ...

    def copy(self, slot: int, piece: Piece) -> None:
        """Copy the slot into the pool."""
        ...

    def num_copied(self) -> int:
        """Return how many copies have ended since the last call; they end in the order of their begin."""
        ...


@dataclass(eq=False)
class Job:
    """Pieces of a pull; over when the last one is in the pool."""

    pieces: Iterator[Piece]
    num_open: int = 0  # slots at work
    is_drawn: bool = False  # no piece is left to begin
    is_over: bool = False


@dataclass(eq=False)
class _Slot:
    number: int
    job: Job
    piece: Piece
    read: int = 0


@dataclass
class Pipeline:
    """Slots of a visit, and pulls in the order of their begin."""

    steps: Steps
    num_slots: int
    waiting: deque[Job] = field(default_factory=deque)  # added by any thread

    def __post_init__(self) -> None:
        self._free = deque(range(self.num_slots))
        self._num_staged = 0
        self._staging: dict[int, _Slot] = {}  # by number of the message
        self._reading: list[_Slot] = []
        self._copying: deque[_Slot] = deque()

    def turn(self) -> bool:
        """Begin whatever can begin; tell whether anything is under way."""
        for number in self.steps.staged():
            if (slot := self._staging.pop(number, None)) is not None:
                slot.read = self.steps.read(slot.number, slot.piece)
                self._reading.append(slot)
        for slot in [slot for slot in self._reading if self.steps.is_read(slot.read)]:
            self._reading.remove(slot)
            self.steps.copy(slot.number, slot.piece)
            self._copying.append(slot)
        for _ in range(self.steps.num_copied()):
            slot = self._copying.popleft()
            self._free.append(slot.number)
            slot.job.num_open -= 1
            slot.job.is_over = slot.job.is_drawn and not slot.job.num_open
        self._fill()
        return bool(self.waiting or self._staging or self._reading or self._copying)

    def _fill(self) -> None:
        while self._free and self.waiting:
            job = self.waiting[0]
            if (piece := next(job.pieces, None)) is None:
                self.waiting.popleft()
                job.is_drawn, job.is_over = True, not job.num_open
                continue
            job.num_open += 1
            slot, self._num_staged = _Slot(self._free.popleft(), job, piece), self._num_staged + 1
            self._staging[self._num_staged] = slot
            self.steps.stage(self._num_staged, slot.number, piece)


def pieces(
    theirs: PoolShape, ours: PoolShape, groups: Sequence[tuple[Sequence[int], Sequence[int]]], slot_bytes: int
) -> Iterator[Piece]:
    """Yield pairs of blocks, counted within their groups, by slots; pieces name them by their ids in the pools."""
    piece = Piece([], [], 0)
    for number, (sources, targets) in enumerate(groups):
        size, source_begin, target_begin = (
            ours.layout.groups[number].block_bytes,
            theirs.begins[number],
            ours.begins[number],
        )
        for source, target in zip(sources, targets, strict=True):
            if piece.num_bytes + size > slot_bytes:
                yield piece
                piece = Piece([], [], 0)
            piece.source_ids.append(source_begin + source)
            piece.target_ids.append(target_begin + target)
            piece = piece._replace(num_bytes=piece.num_bytes + size)
    if piece.source_ids:
        yield piece
