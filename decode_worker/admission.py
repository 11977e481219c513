"""Which sequence gets the next row of the batch.

A free row goes to the sequence whose turn is next (see `row_queue`), whether its blocks lie in this worker's pool or in
another, or it was paused. Two rules take rows from sequences that decode, which are paused and keep their blocks:

1. A sequence gives way to one of better priority, at once.
2. A client gives way to another of the same priority that has two rows fewer, or less, and waited for `PATIENCE_S`.

So a stream that has begun waits until one row comes free in its client's turn. It waits for at most `PATIENCE_S` while
some client has two rows more than its own.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

from decode_worker.arrivals.local_prompts import LocalPrompts
from decode_worker.arrivals.offers import Offers
from decode_worker.arrivals.pulls import Pulls
from decode_worker.sequences.row_queue import Rank, Ranked
from decode_worker.sequences.scheduler import DecodeScheduler
from decode_worker.sequences.sequence import DecodeSequence

PATIENCE_S = 1.0
"""Rows come free faster than that as a rule, without costing anybody a pause."""


PULLS = 2
"""The place of handoffs in other pools among the queues: their blocks are still to come."""


class Started(NamedTuple):
    """A sequence that has got a row."""

    sequence: DecodeSequence
    enters: bool  # its KV is complete


class Admission:
    """Gives rows to sequences; owns none of them."""

    def __init__(
        self,
        scheduler: DecodeScheduler,
        offers: Offers,
        pulls: Pulls,
        local_prompts: LocalPrompts,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduler, self.offers, self.pulls, self.local_prompts = scheduler, offers, pulls, local_prompts
        self._clock = clock

    def fill_rows(self) -> list[DecodeSequence]:
        """Give free rows to those that wait; returns sequences that may enter one at once, or are back in one."""
        entered: list[DecodeSequence] = []
        while self.scheduler.has_row() and (started := self._start_next()) is not None:
            if started.enters:
                entered.append(started.sequence)
        if not self.scheduler.has_row():
            self.pulls.has_room_for_next()  # asks for blocks ahead of the row
        return entered

    def make_room(self) -> bool:
        """Pause a sequence that has to give its row to another; whether one did. Call between steps, then fill rows."""
        if self.scheduler.has_row() or not self.scheduler.num_rows or not (ready := self._ready()):
            return False
        first = min(ready)
        (priority, client), _ = max(self.scheduler.num_rows.items(), key=lambda item: (item[0][0], item[1]))
        is_unfair = self.scheduler.num_rows_of[client] - first.num_rows >= 2
        is_patient = self._clock() - first.since_s < PATIENCE_S
        gives_way = priority > first.priority or (priority == first.priority and is_unfair and not is_patient)
        return gives_way and self.scheduler.pause((priority, client))

    def make_blocks(self) -> DecodeSequence | None:
        """End and return a sequence of worse priority than one that waits for blocks, when there are none."""
        waiting = [rank for rank, _ in self._in_turn()]
        if not waiting or not self.scheduler.active or not self.scheduler.allocator.is_exhausted():
            return None
        first, worst = min(waiting), max(sequence.priority for sequence in self.scheduler.active.values())
        return self.scheduler.preempt() if worst > first.priority and first not in self._ready() else None

    def _ready(self) -> list[Rank]:
        """Return the ranks of those that lack nothing but a row, of the first in each queue and of prompts here."""
        are_ready = self.scheduler.can_resume_next, self.offers.has_blocks_for_next, self.pulls.has_blocks_for_next
        local = self.local_prompts.wants_row
        ranks = [] if local is None else [self.scheduler.paused.rank(local)]
        return ranks + [rank for rank, number in self._in_turn() if are_ready[number]()]

    def _in_turn(self) -> list[tuple[Rank, int]]:
        """Return who is first in each queue, and the number of the queue, in the order of their turns."""
        queues: list[Ranked] = [self.scheduler.paused, self.offers.waiting, self.pulls.waiting]
        ranks = ((queue.first_rank(), number) for number, queue in enumerate(queues))
        return sorted((rank, number) for rank, number in ranks if rank is not None)

    def _start_next(self) -> Started | None:
        """Start the sequence whose turn is next, of those that have all they need.

        A row is kept for a prompt that is to be computed here, if its turn is before.
        """
        starts = self.scheduler.resume_next, self.offers.accept_next, self.pulls.start_next
        local = self.local_prompts.wants_row
        local_rank = None if local is None else self.scheduler.paused.rank(local)
        for rank, number in self._in_turn():
            if local_rank is not None and local_rank < rank and not self.scheduler.has_row(but=1):
                return None
            if (sequence := starts[number]()) is not None:
                return Started(sequence, enters=number != PULLS)
        return None
