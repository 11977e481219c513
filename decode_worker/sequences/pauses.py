"""Pauses: decoding sequences give their rows to others, keep their blocks, and go on later. Torch-free."""

from decode_worker.sequences.row_queue import Group, group_of
from decode_worker.sequences.scheduler import DecodeScheduler, Paused
from decode_worker.sequences.sequence import DecodeSequence


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
