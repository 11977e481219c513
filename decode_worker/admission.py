"""Admission: which sequence gets the next row of the batch.

A free row goes to the sequence whose turn is next (see `row_queue`). Its blocks may lie in this worker's pool or in
another, or the sequence may be paused. Two rules take rows from decoding sequences, which are paused and keep their
blocks:

1. A sequence gives way at once to a sequence of better priority.
2. A client with at least two rows more than a client of the same priority gives way after `PATIENCE_S`.

So a stream, once begun, waits until a row comes free in its client's turn. The wait is at most `PATIENCE_S` while
another client has two rows more.
"""

import time
from collections.abc import Callable

from common.base.errors import ErrorCode
from common.serving.prompts.requests import Fail
from decode_worker.arrivals.arrivals import Arrivals
from decode_worker.arrivals.offers import Offers
from decode_worker.arrivals.pulls import Pulls
from decode_worker.sequences.row_queue import Group, Rank, group_of
from decode_worker.sequences.scheduler import DecodeScheduler, Paused
from decode_worker.sequences.sequence import DecodeSequence

PATIENCE_S = 1.0
"""Rows usually come free faster, without a pause for any stream."""


class Pauses:
    """Exchange of rows among active sequences; the scheduler owns the sequences."""

    def __init__(self, scheduler: DecodeScheduler) -> None:
        self.scheduler, self.waiting = scheduler, scheduler.paused

    def pause(self, group: Group) -> bool:
        """Take the row, or the promised row, of a group's last admitted sequence; false if no sequence has a row."""
        slots = self.scheduler.slots
        with_row = (s for s in reversed(self.scheduler.active.values()) if s.row >= 0 or s in slots.resting)
        victim = next((sequence for sequence in with_row if group_of(sequence) == group), None)
        if victim is None:
            return False
        slots.leave(victim)
        victim.is_paused, victim.mask_slot.place = True, -1
        slots.capacity.count_row(victim, -1)
        self.waiting.add(Paused(victim))
        return True

    def has_blocks_for_next(self) -> bool:
        """Tell whether the next paused sequence may have a row, because its last token is known."""
        paused = self.waiting.first()
        return paused is not None and not paused.sequence.num_in_flight

    def start_next(self) -> DecodeSequence | None:
        """Give the next paused sequence a row, if free; without a block the sequence rests first."""
        slots, paused = self.scheduler.slots, self.waiting.first()
        if paused is None or not slots.capacity.has_row() or paused.sequence.num_in_flight:
            return None
        self.waiting.remove(paused)
        paused.sequence.is_paused = False
        slots.capacity.count_row(paused.sequence, 1)
        slots.enter(paused.sequence)
        return paused.sequence


RowSource = Pauses | Offers | Pulls
"""Sequences that wait for rows."""


class Admission:
    """Assignment of rows and blocks to sequences; owns no sequence.

    Args:
        report: reports a preempted sequence to the router.
    """

    def __init__(
        self,
        scheduler: DecodeScheduler,
        arrivals: Arrivals,
        report: Fail,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduler, self.arrivals, self.report, self._clock = scheduler, arrivals, report, clock
        self.pulls, self.local_rows = arrivals.pulls, arrivals.local_prompts.rows
        self.pauses, self.capacity = Pauses(scheduler), scheduler.capacity
        self._sources: list[RowSource] = [self.pauses, arrivals.offers, arrivals.pulls]

    def fill_rows(self) -> list[DecodeSequence]:
        """Give free rows to waiting sequences; return the sequences that may enter a row at once."""
        entered: list[DecodeSequence] = []
        while self.capacity.has_row() and (started := self._start_next()) is not None:
            source, sequence = started
            if source is not self.pulls:  # the KV is complete
                entered.append(sequence)
        if not self.capacity.has_row():
            self.pulls.prepare_next()  # asks for blocks before a row is free
        return entered

    def make_room(self) -> bool:
        """Pause a sequence whose row goes to another; tell whether a row came free.

        Call between steps, then fill rows.
        """
        if self.capacity.has_row() or not self.capacity.num_rows or not (ready := self._ready()):
            return False
        first = min(ready)
        (priority, client), _ = max(self.capacity.num_rows.items(), key=lambda item: (item[0][0], item[1]))
        is_unfair = self.capacity.num_rows_of[client] - first.num_rows >= 2
        is_patient = self._clock() - first.since_s < PATIENCE_S
        gives_way = priority > first.priority or (priority == first.priority and is_unfair and not is_patient)
        return gives_way and self.pauses.pause((priority, client))

    def make_blocks(self) -> None:
        """Preempt a sequence of worse priority than a sequence that waits for blocks, if no blocks are left."""
        waiting = [rank for rank, _ in self._in_turn()]
        if not waiting or not self.scheduler.active or not self.scheduler.allocator.is_exhausted():
            return
        first, worst = min(waiting), max(sequence.request.priority for sequence in self.scheduler.active.values())
        if worst > first.priority and first not in self._ready():
            self._preempt("out of KV blocks, requests of better priority go first")

    def make_slots(self) -> None:
        """Get blocks for every row's next token; rows without a block rest. If nothing helps, preempt a sequence."""
        self.scheduler.slots.make()
        while self.scheduler.slots.is_starved(self.scheduler.lingering) and not self.arrivals.release_blocks():
            self._preempt(f"{self.arrivals.offers.shortage}, the youngest sequence makes room")
            self.scheduler.slots.make()

    def _preempt(self, reason: str) -> None:
        victim = self.scheduler.preempt()
        self.report(victim.key, ErrorCode.PREEMPTED, reason)

    def _ready(self) -> list[Rank]:
        """Return the ranks of sequences that lack only a row: the first of each queue, and a prompt computed here."""
        local = self.local_rows.wanted
        ranks = [] if local is None else [self.pauses.waiting.rank(local)]
        return ranks + [rank for rank, source in self._in_turn() if source.has_blocks_for_next()]

    def _in_turn(self) -> list[tuple[Rank, RowSource]]:
        """Return the sources with waiting sequences, each with the rank of its first, in the order of turns."""
        firsts = [(source, source.waiting.first()) for source in self._sources]
        ranks = [(source.waiting.rank(first.sequence), source) for source, first in firsts if first is not None]
        return sorted(ranks, key=lambda ranked: ranked[0])

    def _start_next(self) -> tuple[RowSource, DecodeSequence] | None:
        """Start the first sequence by turn that lacks nothing.

        Keep the last free row for a prompt to be computed here whose turn is earlier.
        """
        local = self.local_rows.wanted
        local_rank = None if local is None else self.pauses.waiting.rank(local)
        for rank, source in self._in_turn():
            if local_rank is not None and local_rank < rank and not self.capacity.has_row(but=1):
                return None
            if (sequence := source.start_next()) is not None:
                return source, sequence
        return None
