"""A host tier whose copies are over when a test says so, and whose memory is there at once."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from common.memory.devices.backing import CopyFailed, HostPiece, Memory, Run
from common.memory.host_tier.room import HostRoom
from common.memory.host_tier.tier import HostTier


class ReadyRoom(HostRoom):
    """As many pieces as are `ready` are there as soon as any is wanted: all, unless a test says fewer."""

    def __init__(self, num_pieces: int, piece_bytes: int) -> None:
        super().__init__(piece_bytes, lambda num_bytes: HostPiece(np.zeros(num_bytes, np.uint8)))
        self.num_pieces = self.num_ready = num_pieces

    @property
    def is_made(self) -> bool:
        return len(self.pieces) + self._made.qsize() == self.num_pieces

    def begin(self) -> None:
        for _ in range(self.num_ready - len(self.pieces) - self._made.qsize()):
            self._made.put(self._make(self.piece_bytes))


@dataclass(eq=False)
class SlowCopy:
    """Half of each run is copied when it begins, the other half when it ends."""

    copies: "SlowCopies"
    memory: Memory
    runs: Sequence[Run]
    is_out: bool
    is_over: bool = False

    def took_s(self) -> float | None:
        if self.copies.problem:
            raise CopyFailed(self.copies.problem)
        return 1e-6 if self.is_over else None

    def half(self, which: int) -> None:
        for run in self.runs:
            begin, end = ((0, run.num_bytes // 2), (run.num_bytes // 2, run.num_bytes))[which]
            here = run.piece.content[run.place + begin : run.place + end]
            if self.is_out:
                content: bytearray = self.memory.content  # type: ignore[attr-defined]
                here[:] = np.frombuffer(content, np.uint8)[run.offset + begin : run.offset + end]
            else:
                self.memory.write(run.offset + begin, here.tobytes())


class SlowCopies:
    """None of them gets on by itself; with a `problem` they fail."""

    def __init__(self, batch_bytes: int) -> None:
        self.batch_bytes, self.problem = batch_bytes, ""
        self.begun: list[SlowCopy] = []  # and not over
        self.num_begun = 0

    def begin(self, memory: Memory, runs: Sequence[Run], *, is_out: bool) -> SlowCopy:
        copy = SlowCopy(self, memory, runs, is_out)
        copy.half(0)
        self.begun.append(copy)
        self.num_begun += 1
        return copy

    def finish(self) -> None:
        if self.problem:
            raise CopyFailed(self.problem)
        while self.begun:
            self.end()

    def end(self, number: int = 0) -> None:
        """One more is over, the first of a direction."""
        firsts = [next((copy for copy in self.begun if copy.is_out is way), None) for way in (True, False)]
        if there := [copy for copy in firsts if copy is not None]:
            copy = there[number % len(there)]
            copy.half(1)
            copy.is_over = True
            self.begun.remove(copy)

    @property
    def written(self) -> set[int]:
        """Where in a pool something may be written at any moment: offsets of blocks."""
        return {
            offset
            for copy in self.begun if not copy.is_out
            for run in copy.runs
            for offset in range(run.offset, run.offset + run.num_bytes)
        }  # fmt: skip


def slow_tier(block_bytes: int, num_slots: int, slots_a_piece: int = 3, batch: int = 2) -> tuple[HostTier, SlowCopies]:
    """Of so many slots."""
    copies = SlowCopies(batch * block_bytes)
    return HostTier(ReadyRoom(num_slots // slots_a_piece, slots_a_piece * block_bytes), copies), copies
